#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attach time on the host backend against safetensors reading the same tensors from the page cache, in one run.

    python scripts/bench/attach.py [--tensors 1000 10000 100000] [--gib 1]

For each number of small tensors, and for one checkpoint of `--gib` in 256 tensors: seconds from connect to the last
tensor usable. Starts a daemon of its own on a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from one_rank import daemon
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file

import wcache


def checkpoint(directory: Path, count: int, elements: int) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["Bench"]}))
    save_file(
        {f"t{i}": torch.full((elements,), i % 251, dtype=torch.uint8) for i in range(count)},
        directory / "model.safetensors",
    )
    return directory


def read(path: Path) -> tuple[float, int]:
    """safetensors, every tensor materialised (a byte of each page touched by the copy)."""
    start = time.perf_counter()
    with safe_open(path / "model.safetensors", "pt") as f:
        found = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118
    return time.perf_counter() - start, len(found)


def attach(path: Path, sockets: Path) -> tuple[float, int]:
    start = time.perf_counter()
    with wcache.attach(path, socket_dir=sockets, fallback=False) as held:
        count = len(held.tensors)
        return time.perf_counter() - start, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--gib", type=float, default=1.0)
    options = parser.parse_args()
    table = Table("checkpoint", "safetensors, page cache", "wcache attach", "ratio", title="Attach, host backend")
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        directory = Path(name)
        os.environ["WCACHE_STATE_DIR"] = f"{name}/state"
        cases = [(f"{n} tensors of 1 byte", n, 1) for n in options.tensors]
        if options.gib > 0:
            cases.append((f"256 tensors, {options.gib:g} GiB", 256, int(options.gib * 2**30) // 256))
        with daemon(directory) as socket:
            for label, count, elements in cases:
                path = checkpoint(directory / f"model-{count}-{elements}", count, elements)
                kept = wcache.attach(path, socket_dir=socket.parent)
                theirs = min(read(path)[0] for _ in range(3))
                mine = min(attach(path, socket.parent)[0] for _ in range(3))
                kept.close()
                table.add_row(label, f"{theirs:.3f} s", f"{mine:.3f} s", f"{theirs / mine:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
