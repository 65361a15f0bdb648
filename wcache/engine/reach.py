# SPDX-License-Identifier: Apache-2.0
"""Tensors that hang where nobody could put them back: in sets, slots, closures, bound methods, deep in containers.

Runs in engines, when a module is published. `state` lists the places that can be filled again; what a module reaches
besides them is found here by asking the garbage collector, so that no kind of object has to be known. A parameter that
a closure holds as well counts: it would hold the one of the skeleton. Not followed: classes, Python modules and a
function's globals, which belong to the program and not to the module.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wcache.engine.state import OWN, Spot, join, registered
from wcache.engine.values import fields, type_name

_MEMORY = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.ScriptObject)
_ELSEWHERE = (type, types.ModuleType, types.CodeType, types.FrameType)
# Lead to the whole program; or are made by each process for itself.
_UNSEEN = ("logging.", "threading.", "_thread.", "torch.distributed.")
_ASKED = 8  # tensors whose referrers are looked for; each costs a look at every object


@dataclass(frozen=True, slots=True)
class Hidden:
    """`path`: the attribute under which it was found. `holder`: the type of the object that refers to it."""

    path: str
    holder: str
    memory: Any

    @property
    def is_meta(self) -> bool:
        return str(getattr(self.memory, "device", None)) == "meta"


def hidden(model: nn.Module, spots: Iterable[Spot], but: Collection[int]) -> Iterator[Hidden]:
    """Tensors that are referred to from elsewhere than the registries of modules and `spots`.

    `but`: parameters whose attributes are no business of ours (ids).
    """
    filled: set[tuple[int, int]] = set()  # which object refers to which tensor
    tensors = {id(t): (name, t) for name, _, t in registered(model)}
    for spot in spots:
        tensors.setdefault(id(spot.tensor), (spot.path, spot.tensor))
        filled |= {(id(holder), id(spot.tensor)) for holder in (spot.owner, getattr(spot.owner, "__dict__", None))}
    seen = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for key, value in fields(module):
            if key not in OWN:
                yield from _below(value, join(name, key), module, filled, seen)
    for name, tensor in tensors.values():
        if id(tensor) not in but:
            for key, value in vars(tensor).items():
                yield from _below(value, f"{name}@{key}", tensor, filled, seen)


def forget_results() -> None:
    """Let functions (functools.cache) forget what they answered if there are tensors on the meta device in it."""
    for item in gc.get_referrers(functools._lru_cache_wrapper):
        if type(item) is functools._lru_cache_wrapper and any(t.is_meta for t in _results(item)):
            item.cache_clear()


def left_behind(model: nn.Module, spots: Collection[Spot]) -> str | None:
    """What remembers a tensor on the meta device that came to be with a model, and does not belong to it.

    Looks at the garbage collector's youngest generation only, so it must have been off while the model was built.
    Dictionaries forget it (see `forget`).
    """
    own = {id(t) for _, _, t in registered(model)} | {id(spot.tensor) for spot in spots}
    own |= {id(found.memory) for found in hidden(model, spots, ())}
    young = {id(t) for t in gc.get_objects(0) if issubclass(type(t), torch.Tensor) and t.is_meta} - own
    if not young:
        return None
    gc.collect()
    left = {id(t): t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.is_meta and id(t) in young}
    if forget(model, left):
        return "dictionary"
    asked = [*left.values()][:_ASKED]
    found = [h for t in asked for h in gc.get_referrers(t) if h is not left and h is not asked]
    return next((type_name(type(h)) for h in found if not isinstance(h, types.FrameType)), None)


def forget(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> bool:
    """Let dictionaries that the classes of a model keep, or the Python modules that define them, forget these tensors.

    Returns whether one had any. Other dictionaries are not touched: they may be of other threads.
    """
    caches = [(c, [key for key, value in c.items() if id(value) in tensors]) for c in _caches(model)]
    for cache, keys in caches:
        for key in keys:
            cache.pop(key, None)
    return any(keys for _, keys in caches)


def _caches(model: nn.Module) -> Iterator[dict[Any, Any]]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    places = [*kinds, *(sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules)]
    yield from (value for place in places for value in vars(place).values() if type(value) is dict)


def _results(function: Any) -> Iterator[torch.Tensor]:
    """Tensors among a function's results, or in containers there."""
    todo, seen = gc.get_referents(function), set()
    while todo:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) not in seen and (isinstance(item, dict | list | tuple) or "lru_list" in type(item).__name__):
            seen.add(id(item))
            todo += gc.get_referents(item)


def _below(value: Any, path: str, owner: Any, filled: set[tuple[int, int]], seen: set[int]) -> Iterator[Hidden]:
    todo = [(value, owner)]
    while todo:
        item, holder = todo.pop()
        if isinstance(item, weakref.ReferenceType):
            item = item()
            if not isinstance(item, torch.Tensor):
                continue
        if isinstance(item, _MEMORY):
            if (id(holder), id(item)) not in filled:
                yield Hidden(path, type_name(type(holder)), item)
        elif id(item) in seen or isinstance(item, _ELSEWHERE):
            continue
        elif gc.is_tracked(item) and not f"{type(item).__module__}.".startswith(_UNSEEN):
            seen.add(id(item))
            todo += [(inner, item) for inner in _inside(item)]


def _inside(item: Any) -> list[Any]:
    if isinstance(item, types.FunctionType):
        return [*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__, vars(item)]
    return gc.get_referents(item)
