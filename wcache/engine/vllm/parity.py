# SPDX-License-Identifier: Apache-2.0
"""Two vLLM models of one checkpoint, held against each other: one loaded from disk, one attached to the cache.

For tests and benchmarks, in engines. A portrait is everything that `census` and `capture` know of a model: names,
kinds, classes, dtypes, shapes, strides and bytes of all tensors, and every fact beside them; all plain values, so that
portraits of two processes can be compared. Reads every byte of the model (from a GPU: tensor by tensor).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wcache.engine.tensors import dtype_name
from wcache.engine.vllm import capture, census

Portrait = dict[str, dict[str, Any]]

_SERVING = "kv_cache"  # what an attention layer is given after the load, and writes while it answers
# What vLLM notes on a model whose forward it compiles: the first start of all makes the code, later ones find it.
_COMPILED = ("compiled", "was_aot_compile_fn_loaded_from_disk", "_aot_cache_dir", "_aot_compilation_path")


def portrait(model: nn.Module) -> Portrait:
    """`tensors` by name: [kind, class, dtype, shape, stride, device, SHA-256, first name]; `facts` by path."""
    registered = list(capture.registered(model))
    first: dict[int, str] = {}
    for name, _, t in registered:
        first.setdefault(id(t), name)
    tensors = {name: [str(kind), *_of(t), first[id(t)]] for name, kind, t in registered}
    bare = [(spot.path, "attribute", spot.tensor) for spot in capture.bare(model)]
    beside = [*bare, *((path, "hidden", t) for path, t in capture.hidden(model).items())]
    tensors |= {path: [kind, *_of(t), ""] for path, kind, t in beside if _decides(_leaf(path))}
    training = [name for name, module in model.named_modules() if module.training]
    notes = _compilation_notes(model)
    facts = {name: fact for name, fact in census.facts(model).items() if name not in notes}
    return {"tensors": tensors, "facts": {**facts, "training": training}}


def _compilation_notes(model: nn.Module) -> set[str]:
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Compiled

    compiled = (name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Compiled))
    return {f"{name}.{note}".lstrip(".") for name in compiled for note in _COMPILED}


def _leaf(path: str) -> str:
    return path.rpartition(".")[2].partition("[")[0]


def _decides(leaf: str) -> bool:
    return leaf != _SERVING and not leaf.startswith(census.NOTES)


def _of(tensor: torch.Tensor) -> list[Any]:
    what = [type(tensor).__name__, dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride())]
    return [*what, tensor.device.type, _digest(tensor)]


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def differences(disk: Mapping[str, Any], warm: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing that is not the same in both portraits."""
    found = []
    for what in ("tensors", "facts"):
        one, other = disk[what], warm[what]
        for name in sorted(one.keys() | other.keys()):
            if name not in one or name not in other:
                found.append(f"{name}: only {'attached' if name in other else 'from disk'}")
            elif not census.same(one[name], other[name]):
                found.append(f"{name}: {one[name]} from disk, {other[name]} attached")
    return found
