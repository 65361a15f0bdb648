#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Transformers from disk against Transformers from the cache: seconds, CPU seconds, bytes read, greedy equality.

    from_pretrained.py MODEL [--runs N] [--tokens N] [--device cpu|cuda:0]

MODEL is a checkpoint directory (scripts/make_model.py makes one), or `random:GB` for a Llama of that size with random
bfloat16 weights. Starts a daemon of its own in the foreground; each start is a process of its own, and kinds of starts
take turns, so that what else the machine does meets all of them. Transformers maps checkpoint files and reads most of
them when the first token is made: "read" (from block devices; the page cache is dropped before a cold start) and "first
token" count from the call of from_pretrained, modules imported. CPU seconds are of that call, all threads. Prints a
table for RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from one_rank import daemon

# What one engine does; the socket "-": plain Transformers.
ENGINE = """
import json, sys, time
import torch, transformers
directory, socket, device, tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
options = {} if device == "cpu" else {"device_map": device}
import wcache.transformers
def disk():
    return int(next(l for l in open("/proc/self/io") if l.startswith("read_bytes")).split()[1])
config = transformers.AutoConfig.from_pretrained(directory)
transformers.AutoModelForCausalLM._model_mapping[type(config)]  # imported now: importing is no part of a load
ids = torch.tensor([[1, 5, 9, 13]])
greedy = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
before, start, cpu = disk(), time.perf_counter(), time.process_time()
if socket == "-":
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
else:
    model = wcache.transformers.from_pretrained(directory, socket_path=socket, **options)
if device != "cpu":
    torch.cuda.synchronize()
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
greedy = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in greedy.items()}
model.generate(ids.to(device), max_new_tokens=1, **greedy)
first, read = time.perf_counter() - start, disk() - before
held = wcache.transformers.attachment(model) if socket != "-" else None
out = model.generate(ids.to(device), max_new_tokens=tokens, **greedy)
print(json.dumps({"seconds": seconds, "cpu": cpu, "first": first, "read": read, "tokens": out[0].tolist(),
                  "source": held.source if held else "disk"}))
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
        directory = made(args.model, Path(scratch), args.device)
        size = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        print(f"{directory.name}: {size / 2**20:.0f} MiB, {args.device}, {platform.processor() or platform.machine()}")
        with daemon(Path(scratch), *of_device(args.device)) as socket:
            report(directory, str(socket), args)
    return 0


def report(directory: Path, socket: str, args: argparse.Namespace) -> None:
    first = start(directory, socket, args, drop=True)
    kinds: dict[str, tuple[str, bool]] = {
        "Transformers, cold page cache": ("-", True),
        "Transformers, warm page cache": ("-", False),
        "warm start from the cache, cold page cache": (socket, True),
        "warm start from the cache, warm page cache": (socket, False),
    }
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in kinds}
    for _ in range(args.runs):
        for name, (where, drop) in kinds.items():
            runs[name].append(start(directory, where, args, drop=drop))
    assert first["source"] == "disk"
    assert all(run["source"] == "cache" for name in runs if "start from" in name for run in runs[name])
    runs["first start: identified, loaded, published"] = [first]
    print("| start | load s | best | CPU s | first token s | read from disk | greedy tokens |")
    print("|---|---|---|---|---|---|---|")
    plain = runs["Transformers, cold page cache"][0]
    for name, these in runs.items():
        middle = {key: median(run[key] for run in these) for key in ("seconds", "cpu", "first", "read")}
        same = all(run["tokens"] == plain["tokens"] for run in these)
        print(
            f"| {name} | {middle['seconds']:.3f} | {min(run['seconds'] for run in these):.3f} | {middle['cpu']:.3f}"
            f" | {middle['first']:.3f} | {middle['read'] / 2**20:.1f} MiB | {'equal' if same else 'DIFFERENT'} |"
        )


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
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    print(f"{'plain' if socket == '-' else 'wcache'}{', cold page cache' if drop else ''}: {answer}", file=sys.stderr)
    return answer


def made(model: str, scratch: Path, device: str) -> Path:
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
    with torch.device(device):
        model_made = LlamaForCausalLM(config)
    model_made.save_pretrained(scratch / "random", max_shard_size="4GB")
    del model_made
    if device != "cpu":
        torch.cuda.empty_cache()
    return scratch / "random"


def of_device(device: str) -> list[str]:
    """The lines of wcache.toml that put a rank there."""
    if device == "cpu":
        return []
    from wcache.engine.tensors import gpu_uuid

    return ['backend = "cuda"', f'devices = ["{gpu_uuid(int(device.rpartition(":")[2] or 0))}"]']


if __name__ == "__main__":
    sys.exit(main())
