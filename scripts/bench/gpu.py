#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What wcache does on a GPU, each figure beside a named baseline from the same run.

    python3 scripts/bench/gpu.py [--quick] [--only attach,load,...] [--json FILE] [--directory DIR]

This process never touches CUDA: it holds the descriptors (as systemd's fd store would), runs a real daemon, and reads
memory through NVML; children do the rest. A figure that cannot be had here (a package is missing) says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from daemons import Daemon, Manager  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from wcache.errors import WcacheError  # noqa: E402
from wcache.host.gpu_memory import measure  # noqa: E402
from wcache.model import RankState  # noqa: E402
from wcache.protocol.messages import Evict, Evicted, Verified, Verify  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
PYTHONPATH = os.pathsep.join([*sys.path[:3], *filter(None, [os.environ.get("PYTHONPATH")])])  # for children
WORKER = Path(__file__).with_name("gpu_workers.py")
console = Console(width=150, highlight=False)
failures: list[str] = []


class Worker:
    """A child in one of the roles of gpu_workers.py; `step` waits for its next line."""

    def __init__(self, role: str, *, env: dict[str, str] | None = None, **arguments: Any) -> None:
        self.role = role
        self._started = False
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), role, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, **(env or {})},
        )  # fmt: skip

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._started:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._started = True
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.role} ended with status {self._process.wait()}")
        return dict(json.loads(line))

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def once(role: str, **arguments: Any) -> dict[str, Any]:
    with Worker(role, **arguments) as worker:
        return worker.step()


class Bench:
    def __init__(self, directory: Path, quick: bool) -> None:
        found = once("devices")
        self.gpu: str = found["uuids"][0]
        self.name: str = found["names"][0]
        self.quick = quick
        self.directory = directory
        self.baseline = measure(self.gpu).used
        self.results: dict[str, Any] = {"gpu": self.name, "uuid": self.gpu, "quick": quick}
        self._short = tempfile.mkdtemp(prefix="wc-")
        self.manager = Manager(Path(self._short) / "notify")
        config = {"backend": "cuda", "devices": [self.gpu]}
        self.daemon = Daemon(
            Path(self._short), config=config, manager=self.manager, environment={"PYTHONPATH": PYTHONPATH}
        )

    def close(self) -> None:
        self.daemon.close()
        self.manager.close()
        if failures:
            console.print((Path(self._short) / "log").read_text())
        shutil.rmtree(self._short)
        left = self.settle(self.baseline)
        console.print(f"GPU memory at the end: {left // MIB:+d} MiB beyond the beginning")
        self.results["left_bytes"] = left
        if left > 16 * MIB:
            failures.append(f"{left // MIB} MiB of GPU memory are still in use")

    def used(self) -> int:
        """Bytes in use beyond what was before."""
        return measure(self.gpu).used - self.baseline

    def settle(self, target: int, timeout_s: float = 15.0) -> int:
        """Wait until no more than `target` bytes are in use; what is in use beyond it."""
        deadline = time.monotonic() + timeout_s
        while (beyond := measure(self.gpu).used - target) > 2 * MIB and time.monotonic() < deadline:
            time.sleep(0.05)
        return beyond

    def publish(self, name: str, total: int, count: int) -> float:
        return float(
            once("publish", socket=str(self.daemon.path), gpu=self.gpu, name=name, total=total, count=count)["seconds"]
        )

    def evict(self) -> None:
        with self.daemon.connect() as admin:
            admin.ask(Evict(force=True), Evicted)
        self.settle(self.baseline)

    def weights(self) -> int:
        return sum(s.segment_bytes for s in self.daemon.status().shards)

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[int]]:
        """The most bytes in use while the block runs."""
        most, over = [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.003):
                most[0] = max(most[0], self.used())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield most
        finally:
            over.set()
            thread.join()


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def aim(ok: bool, what: str) -> str:
    if not ok:
        failures.append(what)
    return "yes" if ok else "NO"


def attach(b: Bench) -> None:
    """Attach of a resident shard against torch's legacy CUDA IPC for tensors of the same sizes."""
    rows, sizes = [], (2, 4, 8) if b.quick else (16, 64, 120)
    for gib in sizes:
        for count in (300, 3000):
            name = f"attach-{gib}-{count}"
            published = b.publish(name, gib * GIB, count)
            with Worker("attach", socket=str(b.daemon.path), gpu=b.gpu, name=name) as worker:
                mine = worker.step()
                assert worker.step()["wrong"] == 0
            b.evict()
            with Worker("legacy", total=gib * GIB, count=count) as worker:
                worker.step()
                theirs = worker.step()
                theirs |= worker.step()
            b.settle(b.baseline)
            good = mine["first"] <= theirs["first"] and (gib < 120 or mine["first"] < 0.05)
            phases = mine["timing"]
            rows.append([
                f"{gib} GiB, {mine['tensors']} tensors", ms(mine["first"]), ms(phases["connect"]), ms(phases["map"]),
                ms(mine["first"] - phases["connect"] - phases["map"]), ms(mine["best"]), ms(theirs["first"]),
                ms(theirs["best"]), aim(good, f"attach of {gib} GiB, {count} tensors: {ms(mine['first'])}"),
            ])  # fmt: skip
            b.results[name] = {"wcache": mine, "legacy": theirs, "published_s": published}
    show(
        "1. Attach, connect to last tensor usable (contexts and imports apart)",
        ["", "wcache", "connect", "map", "tensors", "wcache again", "legacy IPC", "legacy again", "aim"],
        rows,
    )


def memory(b: Bench) -> None:
    """GPU memory beyond the weights."""
    total, rows = (2 if b.quick else 16) * GIB, []

    def row(what: str, beyond: int) -> None:
        rows.append([what, f"{beyond / MIB:.0f} MiB"])
        b.results.setdefault("memory", {})[what] = beyond

    for what, torch_too, env in (
        ("a context alone, no torch", False, {}),
        ("  with CUDA_DEVICE_MAX_CONNECTIONS=1", False, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("a context with torch", True, {}),
    ):
        with Worker("context", env=env, torch_too=torch_too) as worker:
            worker.step()
            row(what, b.used())
        b.settle(b.baseline)
    b.publish("memory", total, 300)
    weights = b.weights()
    b.settle(b.baseline + weights)
    row("wcache daemon with a shard", b.used() - weights)
    aim(abs(b.used() - weights) <= 2 * MIB, "the daemon takes GPU memory")
    with Worker("attach", socket=str(b.daemon.path), gpu=b.gpu, name="memory") as worker:
        worker.step()
        row("wcache daemon and an attached engine", b.used() - weights)
    b.evict()
    with Worker("legacy", total=total, count=300) as worker:
        exported = worker.step()["exporting"]
        row("legacy exporter process", b.used() - exported)
        worker.step()
        row("legacy exporter and an importing engine", b.used() - exported)
        worker.step()
    b.settle(b.baseline)
    with Worker("publish_live", socket=str(b.daemon.path), gpu=b.gpu, name="live", total=total, count=300) as worker:
        size = worker.step()["bytes"]
        before = b.used()
        with b.peak() as most:
            live = worker.step()
        row(f"publishing live parameters: peak beyond one copy ({live['rate']:.0f} GB/s)", most[0] - before)
        row("  afterwards", b.used() - before)
    b.results["publish_live"] = {**live, "bytes": size}
    b.evict()
    show(f"2. GPU memory beyond the weights ({total // GIB} GiB)", ["", "MiB"], rows)


def make_checkpoint(directory: Path, gib: int) -> Path:
    """A Llama of about this size in files of 1 to 4 GiB, of random bytes, written as safetensors by hand."""
    directory.mkdir(parents=True)
    hidden, inner, vocab = 4096, 14336, 32000
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": vocab,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    layer = {
        "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [hidden // 4, hidden], "self_attn.v_proj": [hidden // 4, hidden],
        "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }  # fmt: skip
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "lm_head.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
    }
    each = 2 * sum(s[0] * (s[1] if len(s) > 1 else 1) for s in layer.values())
    layers = max(1, (gib * GIB - 4 * vocab * hidden) // each)
    config["num_hidden_layers"] = layers
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    (directory / "config.json").write_text(json.dumps(config))
    names, count = list(shapes), 4
    noise = os.urandom(64 * MIB)
    weight_map = {}
    for k in range(count):
        mine = names[k::count]
        file = f"model-{k + 1:05d}-of-{count:05d}.safetensors"
        header, position = {}, 0
        for name in mine:
            size = 2 * shapes[name][0] * (shapes[name][1] if len(shapes[name]) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [position, position + size]}
            position += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, position, len(noise)):
                f.write(noise[: min(len(noise), position - start)])
            os.fsync(f.fileno())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def forget_pages(directory: Path) -> None:
    """Take the files out of the page cache."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n")


def load(b: Bench) -> None:
    """Cold load, page cache cold and warm, against safetensors, fastsafetensors and what the machine can do."""
    gib = 2 if b.quick else 15
    checkpoint = make_checkpoint(b.directory / "checkpoint", gib)
    loaders: dict[str, Callable[[], Worker]] = {
        "wcache": lambda: Worker("load_wcache", directory=str(checkpoint), gpu=b.gpu, hashed=False),
        "wcache, hashing every file": lambda: Worker("load_wcache", directory=str(checkpoint), gpu=b.gpu, hashed=True),
        "safetensors load_file": lambda: Worker("load_safetensors", directory=str(checkpoint)),
        "fastsafetensors": lambda: Worker("load_fastsafetensors", directory=str(checkpoint)),
    }
    bus = once("pcie")
    rows, rates = [], {}
    try:
        for name, make in loaders.items():
            found = {}
            for cache in ("cold", "warm"):
                with make() as worker:
                    try:
                        worker.step()
                    except RuntimeError as e:
                        console.print(f"{name}: not here ({e})")
                        break
                    if cache == "cold":
                        forget_pages(checkpoint)
                    found[cache] = worker.step()
                b.settle(b.baseline)
            if len(found) == 2:
                rates[name] = found
                extra = f"{found['cold']['extra'] / MIB:.0f} MiB" if "extra" in found["cold"] else ""
                rows.append([name, *(f"{found[c]['rate']:.2f} GB/s" for c in ("cold", "warm")), extra])
        limits = {}
        for cache in ("cold", "warm"):
            for threads in (1, 8, 16):
                if cache == "cold":
                    forget_pages(checkpoint)
                limits[cache, threads] = once("disk", directory=str(checkpoint), threads=threads)["rate"]
    finally:
        shutil.rmtree(checkpoint)
    for threads in (1, 8, 16):
        row = [f"{limits[c, threads]:.2f} GB/s" for c in ("cold", "warm")]
        rows.append([f"reading alone, {threads} threads", *row, ""])
    rows.append(["page-locked memory to the GPU alone", "", f"{bus['h2d']:.1f} GB/s", ""])
    b.results["load"] = {
        "loaders": rates, "bus": bus, "limits": {f"{c} {t}": rate for (c, t), rate in limits.items()},
    }  # fmt: skip
    for cache in ("cold", "warm"):
        best = min(bus["h2d"], max(limits[cache, t] for t in (1, 8, 16)))
        mine = rates["wcache"][cache]["rate"]
        others = {n: r[cache]["rate"] for n, r in rates.items() if not n.startswith("wcache")}
        reached = aim(mine >= 0.9 * best, f"{cache} load: {mine:.2f} of {best:.2f} GB/s")
        ahead = aim(all(mine > r for r in others.values()), f"{cache} load: {mine:.2f} GB/s beside {others}")
        rows.append([f"aim, {cache}: 0.9 of {best:.2f} GB/s; ahead of the others", reached, ahead, ""])
    show(f"3. Load of a checkpoint of {gib} GiB", ["", "disk (cold)", "page cache (warm)", "GPU memory beside"], rows)


def restore(b: Bench) -> None:
    """Verify, copy mode, and what comes after `kill -9`."""
    gib, rows = (8 if b.quick else 120), []
    published = b.publish("restore", gib * GIB, 300)
    weights = b.weights()
    rates = once("digests", socket=str(b.daemon.path), gpu=b.gpu, name="restore")
    ratio = rates["digest"] / rates["sum"]
    rows.append(["digest of every segment, in an engine", f"{rates['digest']:.0f} GB/s"])
    rows.append(["torch sum over the same bytes as int64", f"{rates['sum']:.0f} GB/s"])
    rows.append(["  digest against the sum (aim 70 %)", f"{ratio:.0%} {aim(ratio >= 0.7, f'digest at {ratio:.0%}')}"])
    start = time.monotonic()
    with b.daemon.connect() as admin:
        (verdict,) = admin.ask(Verify(), Verified).verdicts
    whole = time.monotonic() - start
    assert verdict.ok, verdict
    rows.append([f"wcache verify of {gib} GiB, by a child of its own", f"{whole:.2f} s"])
    times = []
    with Worker("attach", socket=str(b.daemon.path), gpu=b.gpu, name="restore") as engine:
        engine.step()
        for _ in range(3):
            b.daemon.kill()
            start = time.monotonic()
            b.daemon.start(wait=False)
            b.daemon.wait_answer()
            b.daemon.wait_status(lambda s: s.state is RankState.READY, "ready after kill -9", 30)
            times.append(time.monotonic() - start)
        assert engine.step()["wrong"] == 0
    shard = b.daemon.status().shards[0]
    assert shard.restored and shard.verified is not None
    listed = ", ".join(f"{t:.2f} s" for t in times)
    rows.append(
        [
            f"kill -9 to ready, {gib} GiB proven (aim 2 s; an engine goes on)",
            f"{listed} {aim(max(times) < 2, f'restore took {listed}')}",
        ]
    )
    rows.append(["  bytes loaded by it", "0 (nothing is configured that could be)"])
    rows.append(["fill, digest and publish it in the first place", f"{published:.2f} s"])
    b.settle(b.baseline + weights)
    b.evict()
    b.publish("copy", min(gib, 32) * GIB, 300)
    copied = once("clone", socket=str(b.daemon.path), gpu=b.gpu, name="copy")
    rows.append([f"copy mode: clone {min(gib, 32)} GiB", f"{copied['rate']:.0f} GB/s, {copied['seconds']:.2f} s"])
    b.evict()
    b.results["restore"] = {
        "rates": rates, "verify_s": whole, "restore_s": times, "publish_s": published, "copy": copied,
    }  # fmt: skip
    show("4. Verify and restore", ["", ""], rows)


def stray(b: Bench) -> None:
    """A stray kernel write in one engine."""
    b.publish("stray", (1 if b.quick else 8) * GIB, 300)
    rows = []
    with Worker("attach", socket=str(b.daemon.path), gpu=b.gpu, name="stray") as neighbour:
        neighbour.step()
        said = once("stray", socket=str(b.daemon.path), gpu=b.gpu, name="stray")["said"]
        rows.append(["the writer", said])
        wrong = neighbour.step()["wrong"]
        rows.append(["wrong tensors in its neighbour", str(wrong)])
    with b.daemon.connect() as admin:
        (verdict,) = admin.ask(Verify(), Verified).verdicts
    rows.append(["digest afterwards", "unchanged" if verdict.ok else verdict.problem])
    aim("illegal memory access" in said and wrong == 0 and verdict.ok, f"stray write: {said}, {wrong}, {verdict}")
    b.results["stray"] = {"said": said, "wrong": wrong, "ok": verdict.ok}
    b.evict()
    show("5. A stray kernel write in one engine", ["", ""], rows)


def driver_version() -> str:
    """As the kernel module says it."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return "unknown"


SECTIONS = {"attach": attach, "memory": memory, "load": load, "restore": restore, "stray": stray}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything work?")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is made (default: a temporary one)")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wcache-bench-", dir=options.directory) as name:
        bench = Bench(Path(name), options.quick)
        console.print(f"{bench.name}, driver {driver_version()}, kernel {os.uname().release}, {os.cpu_count()} cores")
        bench.daemon.start()
        try:
            for section in options.only.split(","):
                begin = time.monotonic()
                try:
                    SECTIONS[section](bench)
                except (Exception, AssertionError) as e:  # noqa: BLE001 - the other sections still have figures
                    failures.append(f"{section}: {type(e).__name__}: {e}")
                    console.print_exception()
                    with contextlib.suppress(WcacheError):
                        bench.evict()
                console.print(f"({section}: {time.monotonic() - begin:.0f} s)\n")
        finally:
            bench.close()
    bench.results["seconds"] = time.monotonic() - start
    bench.results["missed"] = failures
    if options.json is not None:
        options.json.write_text(json.dumps(bench.results, indent=1))
    console.print("every aim was reached" if not failures else "missed:\n  " + "\n  ".join(failures))
    console.print(f"{time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
