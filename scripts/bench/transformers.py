#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Transformers from disk against Transformers from the cache: seconds, bytes read, greedy equality.

    transformers.py MODEL [--runs N] [--tokens N] [--device cpu|cuda:0]

MODEL is a checkpoint directory (scripts/make_model.py makes one), or `random:GB` for a Llama of that size with random
bfloat16 weights. Starts a daemon of its own in the foreground; each start is a process of its own. "read" counts what
a process read(2) of files and faulted in of mapped checkpoint files (before a cold start the page cache is dropped).
Prints a table for RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

START_TIMEOUT_S = 20.0

# What one engine does; `wcache` None: plain Transformers.
ENGINE = """
import json, os, resource, sys, time
import torch, transformers
directory, socket, device, tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
options = {} if device == "cpu" else {"device_map": device}
import wcache.transformers
def disk():
    return int(next(l for l in open("/proc/self/io") if l.startswith("read_bytes")).split()[1])
config = transformers.AutoConfig.from_pretrained(directory)
transformers.AutoModelForCausalLM._model_mapping[type(config)]  # imported now: importing is no part of a load
before, start = disk(), time.perf_counter()
if socket == "-":
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
else:
    model = wcache.transformers.from_pretrained(directory, socket_path=socket, **options)
if device != "cpu":
    torch.cuda.synchronize()
seconds = time.perf_counter() - start
read = disk() - before
held = wcache.transformers.attachment(model) if socket != "-" else None
ids = torch.tensor([[1, 5, 9, 13]], device=device)
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
print(json.dumps({"seconds": seconds, "read": read, "source": held.source if held else "disk",
                  "tokens": out[0].tolist(), "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("model")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--device", default="cpu")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="wc-") as scratch:
        os.environ["WCACHE_STATE_DIR"] = f"{scratch}/state"
        directory = made(args.model, Path(scratch))
        size = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        print(f"{directory.name}: {size / 2**20:.0f} MiB, {args.device}, {platform.processor() or platform.machine()}")
        with daemon(Path(scratch), args.device) as socket:
            report(directory, socket, args)
    return 0


def report(directory: Path, socket: str, args: argparse.Namespace) -> None:
    plain = [start(directory, "-", args, drop=True) for _ in range(args.runs)]
    cached = [start(directory, "-", args) for _ in range(args.runs)]
    first = start(directory, socket, args, drop=True)
    warm = [start(directory, socket, args, drop=True) for _ in range(args.runs)]
    assert first["source"] == "disk" and all(run["source"] == "cache" for run in warm)
    print("| start | seconds (median) | read from disk | greedy tokens |\n|---|---|---|---|")
    for name, runs in (
        ("Transformers, cold page cache", plain),
        ("Transformers, warm page cache", cached),
        ("first start: identified, loaded, published", [first]),
        ("warm start from the cache, cold page cache", warm),
    ):
        same = all(run["tokens"] == plain[0]["tokens"] for run in runs)
        read = median(run["read"] for run in runs)
        seconds = median(run["seconds"] for run in runs)
        print(f"| {name} | {seconds:.3f} | {read / 2**20:.1f} MiB | {'equal' if same else 'DIFFERENT'} |")


def start(directory: Path, socket: str, args: argparse.Namespace, *, drop: bool = False) -> dict[str, object]:
    if drop:
        for file in directory.glob("*.safetensors"):
            with file.open("rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-c", ENGINE, str(directory), socket, args.device, str(args.tokens)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def made(model: str, scratch: Path) -> Path:
    """The checkpoint directory; `random:GB` is made here, a file at a time."""
    if not model.startswith("random:"):
        return Path(model)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round((float(model.removeprefix("random:")) - 2.1) / 0.436))  # of 8B's shape, bfloat16
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, dtype="bfloat16", bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(scratch / "random", max_shard_size="4GB")
    return scratch / "random"


@contextmanager
def daemon(scratch: Path, device: str) -> Iterator[str]:
    (scratch / "run").mkdir()
    lines = [f'socket_dir = "{scratch}/run"', f'state_dir = "{scratch}/state"']
    if device != "cpu":
        from wcache.engine.tensors import gpu_uuid

        lines += ['backend = "cuda"', f'devices = ["{gpu_uuid(int(device.rpartition(":")[2] or 0))}"]']
    (scratch / "wcache.toml").write_text("\n".join(lines))
    command = [sys.executable, "-m", "wcache.daemon", "--rank", "0", "--config", str(scratch / "wcache.toml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    socket = scratch / "run" / "rank-0.sock"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("the daemon did not start")
            time.sleep(0.01)
        yield str(socket)
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
