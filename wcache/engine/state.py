# SPDX-License-Identifier: Apache-2.0
"""What decides a module's result: parameters, buffers, bare tensors, and plain values set while it was loaded.

Runs in engines, in the process that loaded (what is published) and in the one that attaches (what must be there in the
end). Bare tensors are those that modules keep as plain attributes, in lists, tuples and dicts, or in helper objects; a
dotted path names each place. What may hold them differs from engine to engine: `holds` says so.
Surprising: `named_modules` gives a shared module once per name, which is how a tied weight gets all of its names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wcache.engine.entries import Entry
from wcache.errors import PublishError, StructureError
from wcache.model import Kind

MAX_DEPTH = 32  # of helper objects below a module; each is seen once
OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
PLAIN = (bool, int, float, str, type(None))
_LEAVES, _WANTED = frozenset(PLAIN), (torch.Tensor, torch.device)

Holds = Callable[[Any], bool]  # whether a helper object (no container) may hold tensors


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a bare tensor hangs: attribute `key` of `owner`, or its item if `owner` is a list, tuple or dict.

    `above`: where the owner hangs itself, for a tuple, which has to be made anew. `weak`: it is a weak reference.
    """

    path: str
    owner: Any
    key: Any
    tensor: Any
    above: Spot | None = None
    weak: bool = False

    def put(self, value: Any) -> None:
        if self.weak:
            value = weakref.ref(value)
        if isinstance(self.owner, dict | list):
            self.owner[self.key] = value
        elif not isinstance(self.owner, tuple):
            vars(self.owner)[self.key] = value  # as it was found there; a frozen dataclass refuses setattr
        elif self.above is None:
            raise StructureError(f"{self.path}: a tensor inside a tuple cannot be replaced")
        else:
            # What the place holds now, not what it held when it was found: its other items may be new already.
            now = self.above.now()
            self.above.put(_again(now, [value if i == self.key else item for i, item in enumerate(now)]))

    def now(self) -> Any:
        """What is in this place at the moment."""
        if isinstance(self.owner, tuple) and self.above is not None:
            return self.above.now()[self.key]
        return self.owner[self.key] if isinstance(self.owner, dict | list | tuple) else getattr(self.owner, self.key)


def _again(old: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple as `old` with other items, whatever its class takes to make one."""
    if hasattr(old, "n_fields"):  # torch.return_types
        return type(old)(items)
    made = tuple.__new__(type(old), items)
    getattr(made, "__dict__", {}).update(getattr(old, "__dict__", {}))
    return made


def registered(model: nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    """Parameters, then buffers, under every name they have."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, Kind.PARAMETER, parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                kind = Kind.NON_PERSISTENT if leaf in module._non_persistent_buffers_set else Kind.BUFFER
                yield join(prefix, leaf), kind, buffer


def bare(model: nn.Module, holds: Holds, *, aliases: bool = False) -> Iterator[Spot]:
    """Tensors that hang elsewhere than in parameters and buffers, each place once.

    `aliases`: also those that are a parameter or buffer too.
    """
    own = set() if aliases else {id(t) for _, _, t in registered(model)}
    return (s for s in places(model, holds) if isinstance(s.tensor, torch.Tensor) and id(s.tensor) not in own)


def note_device(found: Iterable[Spot], device: torch.device) -> None:
    """Let a module that was built on the meta device, and noted that, have noted `device` instead.

    `found`: its places, which are no longer good afterwards: tuples are made anew.
    """
    for spot in found:
        if isinstance(spot.tensor, torch.device) and spot.tensor.type == "meta":
            spot.put(device)


def places(model: nn.Module, holds: Holds) -> Iterator[Spot]:
    """Every place that holds a tensor or a device, or an object that may hold some."""
    known = {id(m) for m in model.modules()}
    seen: set[int] = set()
    for name, module in model.named_modules():
        yield from _walk(module, name, known, seen, 0, holds, None)


def _walk(
    owner: Any, path: str, known: set[int], seen: set[int], depth: int, holds: Holds, above: Spot | None
) -> Iterator[Spot]:
    # A tuple that hangs in several places is made anew in each.
    if (id(owner) in seen and not isinstance(owner, tuple)) or depth > MAX_DEPTH:
        return
    seen.add(id(owner))
    for key, found in _items(owner, id(owner) in known):
        if type(found) in _LEAVES:  # most attributes are
            continue
        referent = _referent(found)
        value, weak = (found, False) if referent is None else (referent, True)
        wanted = isinstance(value, _WANTED)
        if wanted or (_may_hold_tensors(value, holds) and id(value) not in known):
            spot = Spot(join(path, str(key)), owner, key, value, above if isinstance(owner, tuple) else None, weak)
            yield spot
            if not wanted:
                yield from _walk(value, spot.path, known, seen, depth + 1, holds, spot)


def _referent(value: Any) -> torch.Tensor | None:
    """The tensor that a weak reference refers to; one that calls back when it dies cannot be made again."""
    found = value() if type(value) is weakref.ReferenceType and value.__callback__ is None else None
    return found if isinstance(found, torch.Tensor) else None


def _items(owner: Any, is_known_module: bool) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return [(k, v) for k, v in owner.items() if isinstance(k, str | int)]
    if isinstance(owner, list | tuple):
        return list(enumerate(owner))
    return [(k, v) for k, v in vars(owner).items() if not (is_known_module and k in OWN)]


def _may_hold_tensors(value: Any, holds: Holds) -> bool:
    if isinstance(value, dict | list | tuple):
        return bool(value)
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, nn.Module) or holds(value)


def grouped(
    named: Iterable[tuple[str, Kind, torch.Tensor]], key: Callable[[torch.Tensor], Hashable] = id
) -> list[Entry]:
    """One entry for each tensor object (or `key`), with all of its names; the first says what kind it is."""
    names: dict[Hashable, list[str]] = {}
    first: dict[Hashable, tuple[Kind, torch.Tensor]] = {}
    for name, kind, tensor in named:
        names.setdefault(key(tensor), []).append(name)
        first.setdefault(key(tensor), (kind, tensor))
    return [Entry(tuple(names[k]), kind, tensor) for k, (kind, tensor) in first.items()]


def module_entries(module: nn.Module, attributes: Iterable[str] = ()) -> list[Entry]:
    """Every parameter and buffer of a module, and the declared attributes that are tensors; tied names together."""
    declared = ((name, Kind.ATTRIBUTE, attribute(module, name)) for name in attributes)
    return grouped([*registered(module), *(found for found in declared if isinstance(found[2], torch.Tensor))])


def state_entries(state: Mapping[str, torch.Tensor]) -> list[Entry]:
    """A state dict's tensors as parameters. Names of one tensor together: `state_dict()` makes new objects of ties."""
    return grouped(((name, Kind.PARAMETER, tensor) for name, tensor in state.items()), _alias)


def _alias(t: torch.Tensor) -> Hashable:
    """The same for tensors that are the same elements of the same memory."""
    if t.is_meta or t.layout is not torch.strided or t.numel() == 0:
        return id(t)
    return t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()


def attribute(module: nn.Module, name: str) -> Any:
    """The attribute of a submodule by its dotted name. Raises PublishError if there is none."""
    prefix, _, leaf = name.rpartition(".")
    try:
        return getattr(module.get_submodule(prefix), leaf)
    except AttributeError as e:
        raise PublishError(f"attribute {name}: the module has none") from e


def plain_values(model: nn.Module, *, but: frozenset[str] = frozenset({"training"})) -> dict[str, Any]:
    """Plain attributes of modules ("layer.scale"), of parameters and buffers ("layer.weight@is_shuffled")."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        mine = {k: v for k, v in vars(module).items() if isinstance(v, PLAIN) and v != id(module)}
        found |= {join(name, k): v for k, v in mine.items() if k not in but}
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                where = join(name, leaf)
                found |= {f"{where}@{k}": v for k, v in vars(tensor).items() if isinstance(v, PLAIN)}
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What loading and post-processing set: values that are new or no longer what they were."""
    return {k: v for k, v in after.items() if k not in before or not same(before[k], v)}


def same(a: Any, b: Any) -> bool:
    """Not a number is the same as itself, and zero is not the same as minus zero."""
    return type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else a == b)


def join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
