#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over two GPUs of one host, end to end; prints one table and fails if anything differs.

    python3 scripts/bench/two_gpus.py --model DIR [--out DIR] [--steps safetensors,vllm,preload,transformers]

`safetensors`: two ranks load their shards, one process a rank attaches and compares bytes with slices of the files;
an engine on the other GPU is refused. `vllm`: TP=2 from disk, cold with publication, warm, rank 1's daemon killed under
traffic and back, warm again, and one rank's shard evicted: tokens equal everywhere, no rank mixes. `preload`: a start
from disk (unless `vllm` made one), `loader = "vllm"` on both ranks, then a start that may not read the disk.
`transformers`: its own tensor parallelism over NCCL, plain, published and attached, every local tensor compared. The
daemons see the GPUs in reverse order (CUDA_VISIBLE_DEVICES) and name them by UUID. Descriptors survive in a stand-in
for systemd's fd store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

from daemons import Daemon, Manager  # noqa: E402
from vllm_gpu import PORT, Bench, Process, Start, fetch  # noqa: E402

from wcache.model import RankState  # noqa: E402
from wcache.protocol.messages import Evict, Evicted  # noqa: E402

READY_TIMEOUT_S = 240.0

COMPARE = """
import json, sys, torch, wcache
from safetensors import safe_open
from wcache.errors import Miss
model, sockets, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
held = wcache.attach(model, rank=rank, tp_size=2, socket_dir=sockets, device="cuda:%d" % rank, fallback=False)
index = json.load(open(model + "/model.safetensors.index.json"))["weight_map"]
checked = 0
for name, mine in held.tensors.items():
    with safe_open(model + "/" + index[name], "pt") as f:
        part = f.get_slice(name)
        whole = part.get_shape()
        cut = [slice(None)] * len(whole)
        for dim, (n, m) in enumerate(zip(whole, mine.shape)):
            if n != m:
                cut[dim] = slice(rank * m, (rank + 1) * m)
        theirs = part[tuple(cut)] if cut else part[:]
    assert torch.equal(mine.cpu(), theirs), name
    checked += mine.nbytes
try:
    wcache.attach(model, rank=rank, tp_size=2, socket_dir=sockets, device="cuda:%d" % (1 - rank), fallback=False)
    refused = "NOT REFUSED"
except Miss as e:
    refused = e.reason
print(json.dumps({"bytes": checked, "tensors": len(held.tensors), "other_gpu": refused}))
"""


TRANSFORMERS = """
import json, os, sys, torch, transformers, wcache.transformers
from pathlib import Path
from torch import distributed
from transformers.distributed import DistributedConfig
model, sockets, rank, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
os.environ["MASTER_PORT"] = port
torch.cuda.set_device(rank)
distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
def spread():
    return {"distributed_config": DistributedConfig(tp_size=2, tp_plan="auto")}
def tensors(m):
    return {n: getattr(t, "_local_tensor", t) for n, t in [*m.named_parameters(), *m.named_buffers()]}
plain = transformers.AutoModelForCausalLM.from_pretrained(model, **spread())
theirs, ids = tensors(plain), torch.tensor([[5, 6, 7]], device="cuda")
found = []
for options in ({}, {"fallback": False}):
    made = wcache.transformers.from_pretrained(model, socket_dir=sockets, **options, **spread())
    mine, held = tensors(made), wcache.transformers.attachment(made)
    same = mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    with torch.no_grad():
        answered = torch.equal(made(ids).logits, plain(ids).logits)
    found.append([held.source if held else "private", same, answered])
    distributed.barrier()
print(json.dumps(found))
distributed.destroy_process_group()
"""


def uuids() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def used_mib() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(n) for n in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


class Group:
    """The daemons of two ranks, each with a fd store, seeing the GPUs in reverse order."""

    def __init__(self, directory: Path, **config: object) -> None:
        self.sockets = directory / "run"
        self.managers: list[Manager] = []
        self.daemons: list[Daemon] = []
        settings = {"backend": "cuda", "devices": uuids()[:2], "ranks": [0, 1], "parallel": {"tp_size": 2}, **config}
        for rank in range(2):
            manager = Manager(directory / f"notify-{rank}")
            self.managers.append(manager)
            environment = {"CUDA_VISIBLE_DEVICES": "1,0"}
            self.daemons.append(
                Daemon(directory, rank=rank, config=settings, manager=manager, environment=environment).start()
            )

    def wait_ready(self) -> float:
        start = time.monotonic()
        for daemon in self.daemons:
            daemon.wait_status(lambda s: s.state is RankState.READY, "ready", READY_TIMEOUT_S)
        return time.monotonic() - start

    def shard_mib(self) -> list[int]:
        return [sum(s.segment_bytes for s in d.status().shards) >> 20 for d in self.daemons]

    def evict(self, rank: int) -> None:
        with self.daemons[rank].connect(role="admin") as connection:
            connection.ask(Evict(force=True), Evicted)

    def close(self) -> None:
        for daemon, manager in zip(self.daemons, self.managers, strict=True):
            daemon.close()
            manager.close()


@contextlib.contextmanager
def group(**config: object) -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        made = Group(Path(name), **config)
        os.environ["WCACHE_CONFIG"] = str(Path(name) / "wcache.toml")
        os.environ["WCACHE_STATE_DIR"] = str(Path(name) / "state")
        try:
            yield made
        finally:
            made.close()
            del os.environ["WCACHE_CONFIG"], os.environ["WCACHE_STATE_DIR"]


class TwoGpus:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        bench = argparse.Namespace(
            model=args.model, out=args.out, extra=["--enforce-eager", "--tensor-parallel-size", "2"], compile=False
        )
        self.bench = Bench(bench)
        self.lines: list[tuple[str, str, bool]] = []

    def note(self, what: str, result: object, good: bool) -> None:
        self.lines.append((what, str(result), good))
        print(f"{'ok  ' if good else 'FAIL'} {what}: {result}", flush=True)

    # --- steps --------------------------------------------------------------------------------------------------------

    def safetensors(self) -> None:
        before = used_mib()
        with group(model=self.args.model) as ranks:
            seconds = ranks.wait_ready()
            held = [now - then for now, then in zip(used_mib(), before, strict=True)]
            shards = ranks.shard_mib()
            good = all(abs(h - s) <= 16 for h, s in zip(held, shards, strict=True))
            self.note("two ranks resident, MiB per GPU (shard)", f"{held} ({shards}) in {seconds:.1f} s", good)
            for answer in self._compare(ranks.sockets):
                good = answer["other_gpu"] == "device"
                self.note("attached bytes equal slices of the files; other GPU refused", answer, good)
        time.sleep(1)
        self.note("MiB per GPU when all is gone", used_mib(), used_mib() == before)

    def _compare(self, sockets: Path) -> list[dict[str, Any]]:
        children = [
            subprocess.Popen(
                [sys.executable, "-c", COMPARE, self.args.model, str(sockets), str(rank)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        answers = []
        for child in children:
            out, _ = child.communicate(timeout=180)
            answers.append(json.loads(out) if child.returncode == 0 else {"other_gpu": f"exit {child.returncode}"})
        return answers

    def vllm(self) -> None:
        disk, _ = self.bench.serve("disk")
        with group() as ranks:
            self._same(disk, self._serve("cold"))
            self.note("published, MiB per rank", ranks.shard_mib(), min(ranks.shard_mib()) > 0)
            warm, server = self._serve("warm", fallback=False, keep=True)
            self._same(disk, (warm, server))
            self._kill_under_traffic(ranks, warm)
            server.stop()
            self._same(disk, self._serve("warm-after-kill", fallback=False))
            ranks.evict(0)
            mixed, _ = self._serve("one-rank-evicted")
            self._same(disk, (mixed, None))
            hits = [n for n in mixed.notes if n.startswith("Mapped")]
            self.note("one rank's shard gone: no rank maps", hits or "none mapped", not hits)

    def preload(self) -> None:
        disk = self.bench.starts[0] if self.bench.starts else self.bench.serve("disk")[0]
        arguments = {"max_model_len": 2048, "enforce_eager": True, "gpu_memory_utilization": 0.5}
        with group(model=self.args.model, loader="vllm", engine_args=arguments) as ranks:
            self.note('loader = "vllm" on both ranks', f"ready in {ranks.wait_ready():.1f} s", True)
            self._same(disk, self._serve("warm-from-preload", fallback=False))

    def transformers(self) -> None:
        with group() as ranks:
            command = [sys.executable, "-c", TRANSFORMERS, self.args.model, str(ranks.sockets)]
            children = [
                subprocess.Popen([*command, str(rank), str(PORT + 1)], stdout=subprocess.PIPE, text=True)
                for rank in range(2)
            ]
            said = [child.communicate(timeout=180)[0].strip().rpartition("\n")[2] for child in children]
            wanted = json.dumps([["disk", True, True], ["cache", True, True]])
            self.note("Transformers TP=2: source, tensors equal, logits equal", said, said == [wanted, wanted])

    # --- parts --------------------------------------------------------------------------------------------------------

    def _serve(self, name: str, *, fallback: bool = True, keep: bool = False) -> tuple[Start, Process]:
        extra = json.dumps({"fallback": fallback, "socket_dir": str(Path(os.environ["WCACHE_CONFIG"]).parent / "run")})
        options = ("--load-format", "wcache", "--model-loader-extra-config", extra)
        return self.bench.serve(name, *options, keep=keep)

    def _same(self, disk: Start, served: tuple[Start, Process | None]) -> None:
        start, _ = served
        close = abs(start.kv_tokens - disk.kv_tokens) <= disk.kv_tokens / 10_000
        equal = start.tokens == disk.tokens
        self.note(
            f"{start.name}: tokens and KV cache as from disk", f"{equal}, {start.kv_tokens} tokens", equal and close
        )

    def _kill_under_traffic(self, ranks: Group, warm: Start) -> None:
        """Requests go on while rank 1's daemon is killed and comes back."""
        answers: list[bool] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                answers.append(self.bench.ask(self.args.model) == warm.tokens)

        asking = threading.Thread(target=ask)
        asking.start()
        ranks.daemons[1].kill(signal.SIGKILL)
        ranks.daemons[1].start()
        leased = ranks.daemons[1].wait_status(lambda s: any(x.leases for x in s.shards), "the lease", 30)
        time.sleep(1)
        over.set()
        asking.join()
        good = bool(answers) and all(answers) and all(s.restored for s in leased.shards)
        self.note("rank 1 killed -9 under traffic", f"{len(answers)} answers equal, lease back", good)
        fetch(f"http://127.0.0.1:{PORT}/health")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", default="/tmp/wcache-two-gpus")
    parser.add_argument("--steps", default="safetensors,vllm,preload,transformers")
    args = parser.parse_args()
    run = TwoGpus(args)
    for step in args.steps.split(","):
        began = time.monotonic()
        getattr(run, step)()
        print(f"-- {step}: {time.monotonic() - began:.0f} s", flush=True)
    if run.bench.starts:
        run.bench.table()
    for what, result, good in run.lines:
        print(f"| {'ok' if good else 'FAIL':4s} | {what} | {result} |")
    return 0 if all(good for _, _, good in run.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
