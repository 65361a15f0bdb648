# SPDX-License-Identifier: Apache-2.0
"""Parity of vLLM models, one line a checkpoint: loaded from disk, loaded and published, attached.

    python vllm_methods.py --backend cuda DIR...

All engines run in this process, one after another. For each checkpoint: what vLLM picked for its layers, how wcache
shares that, in how many places the attached model differs from the one from disk (bytes of all tensors and every
attribute, see wcache.engine.vllm.parity), greedy tokens, KV cache blocks, and what the attached one keeps privately. On
a GPU parameters are mapped read-only: that the attached engine answers is the audit that nothing writes into them.
`--every` also tries methods that would fall back, which is how a new row of the table is found. Exit status 1 if a
shared model differs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = [[5, 6, 7, 100, 200], [9, 8, 7], [300, 12, 44, 2, 18, 77, 501]]
HEADINGS = ("checkpoint", "method", "way", "differences", "tokens", "KV blocks", "cold", "warm", "says")


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Seen:
    """One engine: what it is, what it says, and seconds to load it."""

    portrait: Any
    tokens: list[Any]
    blocks: int
    methods: set[str]
    seconds: float
    log: list[str] = field(default_factory=list)


class Engines:
    def __init__(self, sockets: Path, utilization: float) -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        self.log, self.sockets, self.utilization = Log(), sockets, utilization
        logging.getLogger("wcache").addHandler(self.log)

    def run(self, model: Path, **extra: Any) -> Seen:
        """Load, ask, look, and let go."""
        from vllm import LLM, SamplingParams

        from wcache.engine.vllm import methods
        from wcache.engine.vllm.parity import portrait

        self.log.lines.clear()
        began = time.perf_counter()
        engine = LLM(
            str(model), load_format="wcache", model_loader_extra_config={"socket_dir": str(self.sockets), **extra},
            max_model_len=256, enforce_eager=True, gpu_memory_utilization=self.utilization,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        answers = engine.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy, use_tqdm=False)
        loaded = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
        seen = Seen(
            portrait(loaded), [list(a.outputs[0].token_ids) for a in answers],
            engine.llm_engine.vllm_config.cache_config.num_gpu_blocks,
            {str(said) for m in loaded.modules() if (said := methods.said(m)).method}, seconds, list(self.log.lines),
        )  # fmt: skip
        held = loaded.__dict__.pop("_wcache_attachment", None)
        if held is not None:
            held.close()
        engine.llm_engine.engine_core.shutdown()
        del engine, loaded, answers, held
        gc.collect()
        return seen


def compare(engines: Engines, model: Path) -> tuple[list[str], bool]:
    from wcache.engine.vllm.parity import differences

    disk = engines.run(model, socket_dir="/nonexistent")
    cold = engines.run(model)
    warm = engines.run(model)
    said = next((line for line in (*cold.log, *warm.log) if "not published" in line or "unsupported" in line), "")
    shared = any(line.startswith("Mapped ") for line in warm.log)
    found = [*differences(disk.portrait, cold.portrait), *differences(disk.portrait, warm.portrait)]
    equal = disk.tokens == cold.tokens == warm.tokens
    picked = sorted(m for m in disk.methods if not m.startswith(("Unquantized", "Base"))) or sorted(disk.methods)
    for line in found[:5]:
        print(f"  {model.name}: {line}", file=sys.stderr)
    row = [
        model.name, ", ".join(picked), "shared" if shared else "falls back", str(len(found)),
        "equal" if equal else "DIFFER", f"{disk.blocks} {warm.blocks}", f"{cold.seconds:.2f} s",
        f"{warm.seconds:.2f} s", said or next((x for x in warm.log if "private copies" in x), ""),
    ]  # fmt: skip
    return row, shared and (bool(found) or not equal)


@contextlib.contextmanager
def daemon(backend: str, root: Path) -> Any:
    """One rank's daemon in the foreground; yields the directory of its socket."""
    sockets, config = root / "s", root / "wcache.toml"
    sockets.mkdir(mode=0o700)
    config.write_text(f'backend = "{backend}"\nsocket_dir = "{sockets}"\nstate_dir = "{root / "state"}"\n')
    os.environ.update(WCACHE_CONFIG=str(config), WCACHE_STATE_DIR=str(root / "state"))
    with (root / "daemon.log").open("w") as log:
        command = [sys.executable, "-m", "wcache.daemon", "--rank", "0", "--config", str(config)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not (sockets / "rank-0.sock").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon did not come up:\n{(root / 'daemon.log').read_text()}")
            time.sleep(0.05)
        yield sockets
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def try_every_method() -> None:
    """Put back the state of every method, whatever the table says: only to see what comes of it."""
    from wcache.engine.vllm import methods

    known = methods._method_rebuilt
    methods._method_rebuilt = lambda m: known(m) or methods._declares(getattr(m, "quant_method", None)) is False


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("models", nargs="+", type=Path, metavar="DIR")
    p.add_argument("--backend", choices=["host", "cuda"], default="cuda")
    p.add_argument("--every", action="store_true", help="try methods that would fall back, too")
    p.add_argument("--gpu-memory-utilization", type=float, default=0.2, metavar="F")
    args = p.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    failed, rows = False, [list(HEADINGS)]
    with tempfile.TemporaryDirectory(prefix="wcache-methods-") as root, daemon(args.backend, Path(root)) as sockets:
        engines = Engines(sockets, args.gpu_memory_utilization)
        if args.every:
            try_every_method()
        for model in args.models:
            try:
                row, wrong = compare(engines, model)
            except Exception as e:  # noqa: BLE001 - vLLM itself may not run this format on this machine: say so, go on
                row, wrong = [model.name, "", "", "", "", "", "", "", f"{type(e).__name__}: {e}"[:200]], False
            rows.append(row)
            failed |= wrong
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
