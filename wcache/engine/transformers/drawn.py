# SPDX-License-Identifier: Apache-2.0
"""Which tensors a load made up: random numbers went into them, or nobody wrote them. The next start would have others.

Runs in engines that publish. Transformers says which weights it made up, but not of those that a class tells it to be
quiet about, nor of buffers that no checkpoint carries. So the operations are watched: what draws, and what is computed
from it. Numbers that are drawn and not used, or overwritten (many initialisations do that), taint nothing.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wcache.engine import state
from wcache.engine.snapshot import holds
from wcache.model import Kind

_OVERWRITE = ("aten::copy_", "aten::fill_", "aten::zero_")
_FRESH = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


class Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, while it is active, which memory random numbers went into, and which was allocated and never written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random: dict[int, Any] = {}  # memory by its id, kept so that no other gets the same one
        self._unwritten: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name, writes = func._schema.name, func._schema.is_mutable
        given, result = _memories((args, kwargs)), _memories(made)
        read = given.keys() - result.keys() if writes else given.keys()
        if torch.Tag.nondeterministic_seeded in func.tags or read & self._random.keys():
            self._random |= result
        elif name in _OVERWRITE and _is_whole(made, result):
            _forget(self._random, result)
        if name in _FRESH or read & self._unwritten.keys():
            self._unwritten |= result
        elif writes:
            _forget(self._unwritten, result)
        return made

    def names(self, model: nn.Module) -> list[str]:
        """Tensors of the model that were made up."""
        known = self._random.keys() | self._unwritten.keys()
        bare = ((spot.path, spot.tensor) for spot in state.bare(model, holds))
        named = ((name, tensor) for name, _, tensor in state.registered(model))
        return [name for name, tensor in (*named, *bare) if _memories(tensor).keys() & known] if known else []


def random_state() -> list[Any]:
    """Where the generators of torch, Python and NumPy stand."""
    numpy = sys.modules.get("numpy")
    theirs = numpy.random.get_state()[1:3] if numpy else ()
    return [torch.random.get_rng_state().tolist(), random.getstate(), [list(theirs[0]), theirs[1]] if theirs else []]


def built_at_random(model: nn.Module, before: list[Any]) -> str | None:
    """A tensor that a skeleton's factory made by itself, if a generator has moved on from the state `before`."""
    if random_state() == before:
        return None
    bare = state.bare(model, holds)
    return next((s.path for s in bare if not s.tensor.is_meta and s.tensor.is_floating_point()), None)


def made_values(model: nn.Module) -> list[list[str]]:
    """What the skeleton's factory made with values that no checkpoint replaces: names and SHA-256 of the bytes."""
    loaded = (Kind.PARAMETER, Kind.BUFFER)
    named = [(name, tensor) for name, kind, tensor in state.registered(model) if kind not in loaded]
    named += [(spot.path, spot.tensor) for spot in state.bare(model, holds)]
    real = [(n, t) for n, t in named if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]
    return sorted([name, hashlib.sha256(_bytes(tensor)).hexdigest()] for name, tensor in real)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _forget(known: dict[int, Any], memories: Iterable[int]) -> None:
    for key in memories:
        known.pop(key, None)


def _is_whole(tensor: torch.Tensor, memories: Mapping[int, Any]) -> bool:
    return [m.nbytes() for m in memories.values()] == [tensor.numel() * tensor.element_size()]


def _memories(values: Any) -> dict[int, Any]:
    """The memory of every tensor in `values`, by an id."""
    found = (t.untyped_storage() for t in _tensors(tree_leaves(values)) if t.layout is torch.strided and not t.is_meta)
    return {memory._cdata: memory for memory in found if memory.nbytes()}


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """A DTensor's memory is that of its local tensor; other subclasses with inner tensors have none of their own."""
    for value in values:
        plain = getattr(value, "_local_tensor", value)
        if type(plain) in (torch.Tensor, nn.Parameter):
            yield plain
