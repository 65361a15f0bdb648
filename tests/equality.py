# SPDX-License-Identifier: Apache-2.0
"""Are two modules the same, bit for bit: every tensor wherever it hangs, ties, kinds, flags and plain attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, str, type(None))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes: NaN equals itself, and every dtype can be compared."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor).__name__, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


def same_tensor(a: torch.Tensor, b: torch.Tensor, name: str) -> None:
    assert describe(a) == describe(b), f"{name}: {describe(a)} and {describe(b)}"
    assert a.device == b.device, name
    assert torch.equal(raw(a), raw(b)), f"{name}: other bytes"


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {f"parameter {n}": p for n, p in module.named_parameters(remove_duplicate=False)}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                persistent = leaf not in owner._non_persistent_buffers_set
                found[f"buffer {prefix}.{leaf} persistent={persistent}"] = buffer
        found |= {f"attribute {prefix}.{n}": t for n, t in hanging(vars(owner)).items() if not t.is_meta}
    return found


def hanging(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors in plain attributes, and in lists, tuples and dicts there."""
    found: dict[str, torch.Tensor] = {}
    for key, value in values.items():
        if key in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, torch.Tensor):
            found[key] = value
        elif isinstance(value, dict):
            found |= {f"{key}.{k}": t for k, t in hanging({str(k): v for k, v in value.items()}).items()}
        elif isinstance(value, list | tuple):
            found |= {f"{key}.{k}": t for k, t in hanging({str(i): v for i, v in enumerate(value)}).items()}
    return found


def plain(module: nn.Module) -> dict[str, Any]:
    return {
        f"{prefix}.{key}": value
        for prefix, owner in module.named_modules()
        for key, value in vars(owner).items()
        if isinstance(value, PLAIN)
    }


def ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """Names that are one object."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in groups.values()}


def same(a: nn.Module, b: nn.Module) -> None:
    assert type(a) is type(b)
    mine, theirs = named(a), named(b)
    assert mine.keys() == theirs.keys()
    for name in mine:
        same_tensor(mine[name], theirs[name], name)
    assert ties(mine) == ties(theirs)
    assert plain(a) == plain(b)
