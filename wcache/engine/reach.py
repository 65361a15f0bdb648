# SPDX-License-Identifier: Apache-2.0
"""Tensors that hang where nobody could put them back: in sets, slots, closures, bound methods, deep in containers.

Runs in engines, when a module is published. `state` lists the places that can be filled again; what a module reaches
besides them is found here by asking the garbage collector, so that no kind of object has to be known. Not followed:
classes, Python modules and a function's globals, which belong to the program and not to the module.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wcache.engine.state import OWN, join, registered
from wcache.engine.values import type_name

_MEMORY = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
_ELSEWHERE = (type, types.ModuleType, types.CodeType, types.FrameType, weakref.ReferenceType, nn.Module)
# Lead to the whole program; or are made by each process for itself.
_UNSEEN = ("logging.", "threading.", "_thread.", "torch.distributed.")


@dataclass(frozen=True, slots=True)
class Hidden:
    """`path`: the attribute under which it was found. `holder`: the type of the object that refers to it."""

    path: str
    holder: str
    memory: Any

    @property
    def is_meta(self) -> bool:
        return str(self.memory.device) == "meta"


def hidden(model: nn.Module, known: Collection[int], but: Collection[int]) -> Iterator[Hidden]:
    """Tensors that are not `known` (ids). `but`: parameters whose attributes are no business of ours (ids)."""
    seen = set(known)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in OWN:
                yield from _below(value, join(name, key), module, seen)
    for name, _, tensor in registered(model):
        if id(tensor) not in but:
            for key, value in vars(tensor).items():
                yield from _below(value, f"{name}@{key}", tensor, seen)


def _below(value: Any, path: str, owner: Any, seen: set[int]) -> Iterator[Hidden]:
    todo = [(value, owner)]
    while todo:
        item, holder = todo.pop()
        if id(item) in seen or isinstance(item, _ELSEWHERE):
            continue
        if isinstance(item, _MEMORY):
            seen.add(id(item))
            yield Hidden(path, type_name(type(holder)), item)
        elif gc.is_tracked(item) and not f"{type(item).__module__}.".startswith(_UNSEEN):
            seen.add(id(item))
            todo += [(inner, item) for inner in _inside(item)]


def _inside(item: Any) -> list[Any]:
    if isinstance(item, types.FunctionType):
        return [*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__, vars(item)]
    return gc.get_referents(item)
