# SPDX-License-Identifier: Apache-2.0
"""Parity of vLLM models, one line a checkpoint: loaded from disk, loaded and published, attached.

    python vllm_methods.py --backend cuda MODEL...

A MODEL is a checkpoint's directory; `DIR+METHOD` or `DIR+METHOD=DRAFT` also speculates with its own or another draft.
For each: what vLLM picked for its layers, how wcache shares that, in how many places the published and the attached
model differ from the one from disk (bytes of all tensors and every attribute, see wcache.engine.vllm.parity), greedy
tokens, KV cache blocks, seconds to start. Then everything that writes into weights is tried on the attached engine:
what vLLM can be asked for must be refused with the model as it was, a stray write must end the process on a GPU
(parameters are mapped read-only there: that the engine answered is the audit that nothing else wrote), and in the end
the daemon must find every digest unchanged.
`--every` also tries methods that would fall back, which is how a new row of the table is found. Each engine has a
process of its own, forked from one that has imported vLLM. `--jobs` runs several models at a time, with a KV cache of
fixed size. Exit status 1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from one_rank import daemon

PROMPTS = [[5, 6, 7, 100, 200], [9, 8, 7], [300, 12, 44, 2, 18, 77, 501]]
HEADINGS = ("checkpoint", "layers", "way", "differences", "tokens", "KV blocks", "disk, cold, warm", "writes", "why")
SHOWN = 40  # of what is wrong
KV_BYTES = 256 << 20


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass(frozen=True)
class Case:
    """What to start: a checkpoint, and what drafts for it. `text`: as it was asked for."""

    text: str
    model: Path
    draft: dict[str, Any] | None

    @classmethod
    def of(cls, text: str) -> Case:
        directory, _, method = text.partition("+")
        name, _, other = method.partition("=")
        where = {"model": other} if other else {}
        count = 1 if name == "mtp" else 2
        return cls(text, Path(directory), {"method": name, "num_speculative_tokens": count, **where} if name else None)

    @property
    def label(self) -> str:
        return "/".join(self.model.parts[-2:]) + (f" + {self.draft['method']}" if self.draft else "")


# --- in the process of one engine -------------------------------------------------------------------------------------


def engine(case: Case, sockets: Path, args: argparse.Namespace, **extra: Any) -> dict[str, Any]:
    """Start, ask, look; an attached one is then written to. What comes back is plain values."""
    from vllm import LLM, SamplingParams

    from wcache.engine.vllm import methods
    from wcache.engine.vllm.parity import portrait

    log = Log()
    logging.getLogger("wcache").addHandler(log)
    memory = {"kv_cache_memory_bytes": KV_BYTES} if args.jobs > 1 else {}
    began = time.perf_counter()
    llm = LLM(
        str(case.model), load_format="wcache", speculative_config=case.draft, max_model_len=256,
        model_loader_extra_config={"socket_dir": str(sockets), **extra}, enforce_eager=not args.compile,
        gpu_memory_utilization=args.gpu_memory_utilization, **memory,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy, use_tqdm=False)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    models = models_of(worker.model_runner)
    seen = {
        "portraits": [portrait(m) for m in models], "tokens": [list(a.outputs[0].token_ids) for a in answers],
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks, "seconds": seconds, "log": log.lines,
        "layers": sorted({str(said) for model in models for m in model.modules() if (said := methods.said(m)).method}),
    }  # fmt: skip
    attached = all("_wcache_attachment" in m.__dict__ for m in models)
    if attached and not extra:
        seen |= refusals(worker, models[0])
        seen["stray"] = stray_write(models[0])
    return seen


def models_of(runner: Any) -> list[Any]:
    """The target, and the draft if there is one."""
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    draft = getattr(drafter, "model", None)
    return [runner.get_model(), *([draft] if draft is not None else [])]


def refusals(worker: Any, model: Any) -> dict[str, Any]:
    """Ask vLLM for everything that writes into weights: each must be refused with nothing changed."""
    import torch

    from wcache.engine.vllm.parity import differences, portrait
    from wcache.errors import Miss

    def zeros() -> Iterator[tuple[str, torch.Tensor]]:
        return iter([(name, torch.zeros_like(p)) for name, p in model.named_parameters()])

    asked: dict[str, Callable[[], Any]] = {
        "reload": lambda: worker.reload_weights(),
        "reload, kernel format": lambda: worker.reload_weights(weights_iterator=zeros(), is_checkpoint_format=False),
        "load_weights": lambda: model.load_weights(zeros()),
    }
    if hasattr(worker, "reset_weights"):  # since vLLM 0.32
        asked["reset"] = lambda: worker.reset_weights()
    before, allowed = portrait(model), []
    for what, write in asked.items():
        try:
            write()
            allowed.append(what)
        except Miss:
            continue
    return {"refused": len(asked) - len(allowed), "allowed": allowed, "changed": differences(before, portrait(model))}


def stray_write(model: Any) -> str:
    """Write over a mapped parameter: the error that it ends in. A process's CUDA context does not survive it."""
    import torch

    try:
        with torch.no_grad():
            next(model.parameters()).data.zero_()
        torch.accelerator.synchronize()
    except (RuntimeError, torch.AcceleratorError) as e:
        return str(e).partition("\n")[0]
    return ""


# --- in the process of one model --------------------------------------------------------------------------------------


class Fork:
    """`work` in a process of its own, which says what it returns, or {"died": why}. `log`: where its output goes."""

    def __init__(self, work: Callable[[], dict[str, Any]], log: Path | None = None) -> None:
        self._read, write = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._read)
            self._run(work, log, write)
        os.close(write)

    @staticmethod
    def _run(work: Callable[[], dict[str, Any]], log: Path | None, write: int) -> None:
        if log is not None:
            with log.open("ab") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
        try:
            answer = work()
        except BaseException as e:  # vLLM itself may not run this model on this machine
            logging.getLogger(__name__).exception("failed")
            answer = {"died": " ".join(f"{type(e).__name__}: {e}".split())[:300]}
        sys.stdout.flush()
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)

    def answer(self, limit_s: float) -> dict[str, Any]:
        text, deadline = b"", time.monotonic() + limit_s
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                part = pipe.read(1 << 20)
                if not part:
                    break
                text += part
            else:
                os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        if text:
            return dict(json.loads(text))
        return {"died": f"no answer; exit status {os.waitstatus_to_exitcode(status)}"}


def examine(case: Case, sockets: Path, args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """One row: its cells, whether the model is shared, and what is wrong."""
    log, seen = logs / f"{case.label.replace(' ', '').replace('/', '-')}.log", []
    for extra in ({"socket_dir": "/nonexistent"}, {"mode": "zero_copy"}, {}):
        seen.append(Fork(partial(engine, case, sockets, args, **extra), log).answer(args.limit))
        if "died" in seen[-1]:
            return {"model": case.text, "cells": [case.label, *[""] * (len(HEADINGS) - 2), seen[-1]["died"]],
                    "shared": False, "wrong": []}  # fmt: skip
    disk, cold, warm = seen
    shared = [line.startswith("Mapped ") for line in warm["log"]].count(True) == len(disk["portraits"])
    found = differences_of(disk, cold) + differences_of(disk, warm)
    equal = disk["tokens"] == cold["tokens"] == warm["tokens"]
    wrong = [*found, *([] if equal else ["tokens differ"]), *wrongly_written(warm, args.backend)] if shared else []
    plain = ("Unquantized", "Base")
    layers = [m for m in disk["layers"] if not m.startswith(plain)] or disk["layers"]
    said = [x for x in (*cold["log"], *warm["log"]) if "not published" in x or "unsupported" in x or "unusable" in x]
    cells = [
        case.label, ", ".join(layers), "shared" if shared else "falls back", str(len(found)),
        "equal" if equal else "DIFFER", "-" if args.jobs > 1 else " ".join(str(s["blocks"]) for s in seen),
        " ".join(f"{s['seconds']:.1f}" for s in seen) + " s",
        f"{warm['refused']} refused; {warm['stray'] or 'own pages'}" if shared else "",
        "" if shared else next(iter(said[-1:]), ""),
    ]  # fmt: skip
    return {"model": case.text, "cells": cells, "shared": shared, "wrong": wrong}


def differences_of(disk: dict[str, Any], other: dict[str, Any]) -> list[str]:
    from wcache.engine.vllm.parity import differences

    pairs = zip(disk["portraits"], other["portraits"], strict=True)
    return [line for pair in pairs for line in differences(*pair)]


def wrongly_written(warm: dict[str, Any], backend: str) -> list[str]:
    found = [f"{what} was not refused" for what in warm["allowed"]] + warm["changed"]
    return found + (["a stray write had no effect"] if backend == "cuda" and not warm["stray"] else [])


# --- in the process that forks them -----------------------------------------------------------------------------------


def rows_of(cases: list[Case], sockets: Path, args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    rows = []
    for case in cases:
        rows.append(examine(case, sockets, args, logs))
        print(f"| {' | '.join(rows[-1]['cells'])} |", flush=True)
    return {"rows": rows}


def verified(sockets: Path) -> list[str]:
    """Have the daemon compute every digest anew: which shards are not what was published."""
    from wcache.protocol.connection import connect, socket_path
    from wcache.protocol.messages import Verified, Verify

    with connect(socket_path(sockets, 0), role="admin", name="bench") as connection:
        verdicts = connection.ask(Verify(), Verified).verdicts
    print(f"\n{len(verdicts)} shards, {[v.ok for v in verdicts].count(True)} with the digests they were published with")
    return [f"shard {v.fingerprint} has changed" for v in verdicts if not v.ok]


def try_every_method() -> None:
    """Put back the state of every method, whatever the table says: only to see what comes of it."""
    from wcache.engine.vllm import methods

    known = methods._method_rebuilt
    methods._method_rebuilt = lambda m: known(m) or methods._declares(getattr(m, "quant_method", None)) is False


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("models", nargs="+", type=Case.of, metavar="MODEL", help="DIR, DIR+METHOD or DIR+METHOD=DRAFT")
    p.add_argument("--backend", choices=["host", "cuda"], default="cuda")
    p.add_argument("--every", action="store_true", help="try methods that would fall back, too")
    p.add_argument("--compile", action="store_true", help="compile models and capture graphs, as vLLM does by default")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time; the KV cache is not sized then")
    p.add_argument("--gpu-memory-utilization", type=float, default=0.2, metavar="F")
    p.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for one process")
    p.add_argument("--logs", type=Path, metavar="DIR", help="where to keep what the engines print")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    args = p.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    backend = f'backend = "{args.backend}"'
    with tempfile.TemporaryDirectory(prefix="wcache-methods-") as root, daemon(Path(root), backend) as socket:
        sockets = socket.parent
        os.environ.update(WCACHE_CONFIG=f"{root}/wcache.toml", WCACHE_STATE_DIR=f"{root}/state")
        logs = args.logs or Path(root)
        logs.mkdir(parents=True, exist_ok=True)
        import_vllm()
        if args.every:
            try_every_method()
        print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
        parts = [args.models[i :: args.jobs] for i in range(args.jobs)]
        forks = [Fork(partial(rows_of, part, sockets, args, logs)) for part in parts]
        answers = [fork.answer(3 * args.limit * len(args.models)) for fork in forks]
        changed = verified(sockets)
    rows = [row for answer in answers for row in answer.get("rows", [])]
    wrong = [f"{row['cells'][0]}: {line}" for row in rows for line in row["wrong"]] + changed
    wrong += [answer["died"] for answer in answers if "died" in answer]
    print("\n".join(wrong[:SHOWN]))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "wrong": wrong}))
    return int(bool(wrong))


def import_vllm() -> None:
    """Once, before the forks; nothing here may touch the GPU."""
    from vllm import LLM  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()


if __name__ == "__main__":
    raise SystemExit(main())
