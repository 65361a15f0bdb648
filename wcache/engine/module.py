# SPDX-License-Identifier: Apache-2.0
"""Filling a module that was built on the meta device from a shard's tensors.

Runs in engines. Every name, shape, dtype and stride must agree before anything is bound; every difference is named.
Parameters stand on the shared memory and never require grad; buffers get a private clone, because an engine may write
them. Nothing is made up: what the shard does not carry must be computed by `init`, or it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from wcache.engine.entries import Entry
from wcache.engine.publish import module_entries
from wcache.errors import StructureError
from wcache.model import Kind
from wcache.weights.manifest import contiguous_stride

_SHOWN = 8  # differences that the message spells out; the error carries all


def fill(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    init: Callable[[nn.Module], object] | None = None,
    strict: bool = True,
) -> None:
    """Bind `tensors` to `module` in place.

    `init(module)`: computes non-persistent buffers that no checkpoint carries (rotary tables, masks); it is called
    when everything else is bound, and must leave nothing on meta. `strict` false: tensors of the shard that the module
    does not have are left out. Names that are tied in the module get one tensor, unless the shard holds two.
    Raises StructureError before anything is bound, or for what is left on meta in the end.
    """
    entries = module_entries(module)
    problems = list(_differences(entries, tensors, strict=strict))
    _refuse(problems, "module and shard do not agree")
    modules = dict(module.named_modules(remove_duplicate=False))
    done: dict[int, torch.Tensor] = {}
    for entry in entries:
        for name in entry.names:
            found = _source(name, entry.names, tensors)
            if found is not None:
                _put(modules, name, entry.kind, found, done)
    if init is not None:
        init(module)
    left = [name for entry in module_entries(module) if entry.tensor.is_meta for name in entry.names]
    _refuse(
        [f"{name}: still on the meta device" for name in left],
        "tensors that the shard does not carry were not initialised",
        hint="non-persistent buffers are no part of a checkpoint: compute them in init=",
    )


def _source(name: str, names: tuple[str, ...], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The shard's tensor of that name, or of a name that the module ties to it."""
    return next((tensors[n] for n in (name, *names) if n in tensors), None)


def _differences(entries: list[Entry], tensors: Mapping[str, torch.Tensor], *, strict: bool) -> Iterator[str]:
    wanted: set[str] = set()
    for entry in entries:
        wanted.update(entry.names)
        for name in entry.names:
            found = _source(name, entry.names, tensors)
            if found is not None:
                yield from _disagreements(name, entry.tensor, found)
            elif entry.kind is not Kind.NON_PERSISTENT:
                yield f"{name}: in the module, not in the shard"
    if strict:
        yield from (f"{name}: in the shard, not in the module" for name in sorted(tensors.keys() - wanted))


def _disagreements(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> Iterator[str]:
    if mine.shape != theirs.shape:
        yield f"{name}: shape {tuple(mine.shape)} in the module, {tuple(theirs.shape)} in the shard"
    elif _strides(mine) != _strides(theirs):
        yield f"{name}: strides {mine.stride()} in the module, {theirs.stride()} in the shard"
    if mine.dtype != theirs.dtype:
        yield f"{name}: {mine.dtype} in the module, {theirs.dtype} in the shard"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that matter: those of dims with more than one element."""
    if tensor.numel() == 0:
        return contiguous_stride(tuple(tensor.shape))
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


def _put(
    modules: Mapping[str, nn.Module], name: str, kind: Kind, tensor: torch.Tensor, done: dict[int, torch.Tensor]
) -> None:
    prefix, _, leaf = name.rpartition(".")
    owner = modules[prefix]
    if id(tensor) not in done:
        made = nn.Parameter(tensor, requires_grad=False) if kind is Kind.PARAMETER else tensor.clone()
        done[id(tensor)] = made
    if kind is Kind.PARAMETER:
        old = owner._parameters.get(leaf)
        made = done[id(tensor)]
        if old is not None:
            made.__dict__.update(old.__dict__)
        owner._parameters[leaf] = made  # type: ignore[assignment]
    else:
        owner._buffers[leaf] = done[id(tensor)]


def _refuse(problems: list[str], what: str, hint: str | None = None) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StructureError(f"{what}: {'; '.join(problems[:_SHOWN])}{more}", problems, hint=hint)
