# SPDX-License-Identifier: Apache-2.0
"""Filling a module that was built on the meta device from a shard's tensors.

Runs in engines. Every name, shape, dtype and stride must agree before anything is bound; every difference is named.
Parameters keep the class and the attributes they had, stand on the shared memory and never require grad; buffers get
a private clone, because an engine may write them. Nothing is made up: what the shard does not carry must be computed
by `init`, or it is an error. `init_buffers` is that for modules of Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from wcache.engine import state
from wcache.engine.entries import Entry
from wcache.errors import StructureError, listed
from wcache.model import Kind
from wcache.weights.manifest import contiguous_stride

_LOADED = "_is_hf_initialized"  # how Transformers marks a tensor that its initialisation must leave alone


def fill(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    init: Callable[[nn.Module], object] | None = None,
    attributes: Mapping[str, Any] | None = None,
    requires_grad: bool = False,
) -> None:
    """Bind `tensors` to `module` in place.

    `init(module)`: computes non-persistent buffers that no checkpoint carries (rotary tables, masks); it is called
    when everything else is bound, and must leave nothing on meta. `attributes`: plain values, or tensors (cloned), by
    dotted name. Names that are tied in the module get one tensor, unless the shard holds two.
    Raises StructureError before anything is bound, or for what is left on meta in the end.
    """
    entries = state.module_entries(module)
    modules = dict(module.named_modules(remove_duplicate=False))
    homeless = [n for n in attributes or {} if n.rpartition(".")[0] not in modules]
    problems = [
        *_differences(entries, tensors),
        *(f"{n}: in the shard, and no such module" for n in homeless),
    ]
    if init is None:
        problems += [
            f"{name}: would stay on the meta device" for name in _left(module, but={**tensors, **(attributes or {})})
        ]
    _refuse(problems, "module and shard do not agree", hint=_HINT if init is None else None)
    done: dict[tuple[int, bool], torch.Tensor] = {}
    for entry in entries:
        for name in entry.names:
            found = _source(name, entry.names, tensors)
            if found is not None:
                _put(modules, name, entry, found, done, requires_grad)
    for name, value in (attributes or {}).items():
        prefix, _, leaf = name.rpartition(".")
        setattr(modules[prefix], leaf, value.clone() if isinstance(value, torch.Tensor) else value)
    if init is not None:
        init(module)
    left = [f"{name}: still on the meta device" for name in _left(module)]
    _refuse(left, "tensors that the shard does not carry were not initialised", hint=_HINT)


_HINT = "non-persistent buffers are no part of a checkpoint: compute them in init= (Transformers: wcache.init_buffers)"


def _left(module: nn.Module, but: Mapping[str, object] | None = None) -> list[str]:
    """Names of tensors on meta, wherever the module keeps them; `but`: those that are about to be bound."""
    known = but or {}
    left = [
        n for e in state.module_entries(module) if e.tensor.is_meta and not known.keys() & {*e.names} for n in e.names
    ]
    return left + [s.path for s in state.bare(module, lambda _: False) if s.tensor.is_meta and s.path not in known]


def init_buffers(module: nn.Module) -> None:
    """Let a Transformers model compute the buffers that no checkpoint carries, by its own initialisation.

    Its `initialize_weights` fills what is not marked as loaded, as `from_pretrained` has it do; a buffer that it leaves
    untouched stays on meta, so that `load_into` refuses it. Raises StructureError for another kind of module.
    """
    initialize = getattr(module, "initialize_weights", None)
    if initialize is None:
        raise StructureError(
            f"{type(module).__name__} has no initialize_weights: it is no Transformers model",
            hint="compute its non-persistent buffers in a function of your own (init=)",
        )
    bound = {id(t): t for _, _, t in state.registered(module) if not t.is_meta}
    device = next((t.device for t in bound.values()), torch.device("cpu"))
    fresh: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor, int]] = []
    for owner in module.modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta and leaf in owner._non_persistent_buffers_set:
                room = _room(buffer, device)
                owner._buffers[leaf] = room
                fresh.append((owner, leaf, buffer, room, room._version))
    marked = [t for t in bound.values() if not hasattr(t, _LOADED)]
    for tensor in marked:
        setattr(tensor, _LOADED, True)
    try:
        initialize()
    finally:
        for tensor in marked:
            delattr(tensor, _LOADED)
        for owner, leaf, old, room, version in fresh:
            if owner._buffers[leaf] is room and room._version == version:
                owner._buffers[leaf] = old  # nobody wrote it: what it holds is no value


def _room(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a buffer on meta; what is made in inference mode would not tell whether somebody wrote it."""
    with torch.inference_mode(False):
        return torch.empty_like(buffer, device=device)


def _source(name: str, names: tuple[str, ...], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The shard's tensor of that name, or of a name that the module ties to it."""
    return next((tensors[n] for n in (name, *names) if n in tensors), None)


def _differences(entries: list[Entry], tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    wanted: set[str] = set()
    for entry in entries:
        wanted.update(entry.names)
        for name in entry.names:
            found = _source(name, entry.names, tensors)
            if found is not None:
                yield from _disagreements(name, entry.tensor, found)
            elif entry.kind is not Kind.NON_PERSISTENT:
                yield f"{name}: in the module, not in the shard"
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
    modules: Mapping[str, nn.Module],
    name: str,
    entry: Entry,
    tensor: torch.Tensor,
    done: dict[tuple[int, bool], torch.Tensor],
    requires_grad: bool,
) -> None:
    prefix, _, leaf = name.rpartition(".")
    owner, is_parameter = modules[prefix], entry.kind is Kind.PARAMETER
    key = (id(tensor), is_parameter)
    if key not in done:
        done[key] = _parameter(entry.tensor, tensor, requires_grad) if is_parameter else tensor.clone()
    (owner._parameters if is_parameter else owner._buffers)[leaf] = done[key]  # type: ignore[assignment]


def _parameter(old: torch.Tensor, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A parameter over `tensor` of the class and with the attributes that the module gave it."""
    trained = requires_grad and old.requires_grad
    made = torch.Tensor._make_subclass(type(old), tensor, trained)
    made.__dict__.update(old.__dict__)
    return made


def _refuse(problems: list[str], what: str, hint: str | None = None) -> None:
    if problems:
        raise StructureError(f"{what}: {listed(problems)}", problems, hint=hint)
