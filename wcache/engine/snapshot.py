# SPDX-License-Identifier: Apache-2.0
"""A loaded module as the difference to its skeleton: taken where it was loaded, to be put onto the same one elsewhere.

Runs in engines (plain PyTorch, Transformers). A skeleton is the module built on the meta device; its `structure` is
part of the layout key, so that a shard only ever meets the skeleton it was taken from. What cannot be put back exactly
(tensors with unknown state of their own, modules that loading replaced, objects nobody can rebuild) is refused when it
is taken, with a reason, and nothing is published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wcache.engine import parts, reach, state, values
from wcache.engine.entries import Entry
from wcache.engine.parts import Parts
from wcache.engine.state import Holds, Spot
from wcache.engine.tensors import dtype_name
from wcache.errors import PublishError, StructureError
from wcache.model import Kind
from wcache.weights.fingerprint import digest

_NO_STATE = ("torch.", "builtins.", "collections.", "numpy.", "threading.", "logging.", "functools.", "types.")
FORM = 3  # of what a manifest carries; part of the key: what another version of wcache wrote is another shard
# Keys of what a manifest carries besides tensors and attributes.
GRAD, GONE, NONE, TENSOR_TYPES = "requires_grad", "gone", "none", "tensor_types"
BARE = "bare"  # paths, in the order in which a container has them
ORDER = "order"  # names of parameters, buffers, modules and non-persistent buffers, where loading changed them
UNSET = "unset"  # plain attributes that loading took away
PARTS, VALUES = "parts", "values"  # how parameters of several tensors go together; values that are more than plain


def holds(value: Any) -> bool:
    """Any object of the program itself may hold tensors."""
    return not f"{type(value).__module__}.".startswith(_NO_STATE)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A module as it was built, before its weights came. `structure`: digest of all of it."""

    structure: str
    names: frozenset[str]
    values: dict[str, Any]
    types: dict[str, str]
    tensor_types: dict[str, str]
    marks: dict[str, str]
    order: dict[str, list[list[str]]]
    places: dict[str, Spot]  # of bare tensors, and of helper objects and containers that may hold them


def skeleton(model: nn.Module, holds: Holds = holds) -> Skeleton:
    """Raises StructureError for modules whose tensors nobody can exchange."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise StructureError(f"{name or 'the module'} is a {type(module).__name__}, compiled and closed")
    named = list(state.registered(model))
    tensors = [[n, str(k), dtype_name(t.dtype), list(t.shape), list(t.stride()), *_placed(t)] for n, k, t in named]
    types = _types(model)
    own = {id(t) for _, _, t in named}
    places = {s.path: s for s in state.places(model, holds)}
    bare = [s for s in places.values() if isinstance(s.tensor, torch.Tensor) and id(s.tensor) not in own]
    return Skeleton(
        digest([sorted(tensors, key=str), types]),
        frozenset(name for name, _, _ in named),
        state.plain_values(model, but=frozenset()),
        types,
        _tensor_types(named, bare),
        values.marks(model, holds, bare),
        _order(model),
        places,
    )


def _placed(tensor: torch.Tensor) -> list[Any]:
    return [parts.placement(tensor)] if parts.is_dtensor(tensor) else []


def _types(model: nn.Module) -> dict[str, str]:
    """By name; a module that goes by several names is what the first of them is."""
    found: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), name)
        found[name] = values.type_name(type(module)) if known == name else f"the same as {known or 'the root'}"
    return found


def _order(model: nn.Module) -> dict[str, list[list[str]]]:
    """What each registry of a module has, in its order: None, too."""
    return {
        name: [list(m._parameters), list(m._buffers), list(m._modules), sorted(m._non_persistent_buffers_set)]
        for name, m in model.named_modules()
    }


def _tensor_types(named: Iterable[tuple[str, Kind, torch.Tensor]], bare: Iterable[Spot]) -> dict[str, str]:
    """Types of those that are more than a parameter, or a plain tensor elsewhere, by name."""
    usual = [(n, t, nn.Parameter if k is Kind.PARAMETER else torch.Tensor) for n, k, t in named]
    usual += [(s.path, s.tensor, torch.Tensor) for s in bare]
    return {name: values.type_name(type(t)) for name, t, kind in usual if type(t) is not kind}


@dataclass(frozen=True, slots=True)
class Taken:
    """What is published of a loaded module: tensors, plain values that loading set, and how to put them back."""

    entries: list[Entry]
    attributes: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


def take(
    model: nn.Module,
    before: Skeleton,
    holds: Holds = holds,
    *,
    declared: Collection[str] = (),
    known: Collection[str] = (),
    skip_meta: bool = False,
) -> Taken:
    """Everything that tells a loaded module from its skeleton. Raises PublishError for what could not be put back.

    `declared`: paths of attributes that must be carried, plain values of any depth. `known`: paths that the caller puts
    back itself. `skip_meta`: bare tensors that the engine itself leaves on the meta device are left out.
    """
    named = list(state.registered(model))
    everywhere = list(state.bare(model, holds, aliases=True))
    split = _split(model, named)
    shared = _shared(split)
    _check_reach(model, everywhere, split, shared, skip_meta=skip_meta)
    spots = [s for s in everywhere if not (skip_meta and s.tensor.is_meta) and not _comes_along(s.path, shared)]
    own = {id(t) for _, _, t in named}
    alone = [s for s in everywhere if id(s.tensor) not in own]
    plain_ones = [each for each in named if id(each[2]) not in split]
    types = _tensor_types(plain_ones, (s for s in spots if id(s.tensor) not in own))
    _check_rebuildable(model, before, named, spots, types)
    together: dict[str, Any] = {}
    entries = list(_in_parts(state.grouped(_everything(named, spots)), split, together))
    after = state.plain_values(model, but=frozenset())
    plain = state.changed(before.values, after)
    plain = {path: v for path, v in plain.items() if _is_plain(path, v, within=together)}
    _check_places(model, plain)
    bare = {s.path for s in spots}
    now = {name for name, _, _ in named}
    inside = {name for said in together.values() for name in said["names"]}
    unset = before.values.keys() - after.keys() - bare - shared
    after_marks = values.marks(model, holds, alone)
    carried = _changed(model, before, after_marks, {*declared, *known, *shared}, inside)
    carried |= {path: _declared(model, path) for path in declared if path not in bare}
    _check_kept(before, {s.path for s in everywhere}, {*plain, *carried})
    extra = {
        GRAD: sorted(n for n, k, t in named if k is Kind.PARAMETER and t.requires_grad),
        BARE: [s.path for s in spots],
        GONE: sorted(before.names - now),
        NONE: sorted(n for n in before.names - now if _is_none(model, n)),
        ORDER: {name: order for name, order in _order(model).items() if before.order.get(name) != order},
        UNSET: sorted(path for path in unset if path.rpartition("@")[0] not in inside),
        TENSOR_TYPES: types,
        PARTS: together,
        VALUES: carried,
    }
    return Taken(entries, plain, extra)


def _check_reach(
    model: nn.Module, spots: Iterable[Spot], split: Collection[int], shared: Collection[str], *, skip_meta: bool
) -> None:
    for found in reach.hidden(model, spots, split):
        if not (skip_meta and found.is_meta) and not _comes_along(found.path, shared):
            raise PublishError(f"{found.path} keeps a tensor in a {found.holder}, where it cannot be put back")


def _check_kept(before: Skeleton, bare: Collection[str], carried: set[str]) -> None:
    """A place that had a tensor has one, or is filled otherwise, or is inside of something that is."""
    for path, spot in before.places.items():
        if isinstance(spot.tensor, torch.Tensor) and path not in bare and carried.isdisjoint([path, *_above(path)]):
            raise PublishError(f"loading took the tensor {path} away")


def _check_places(model: nn.Module, plain: Mapping[str, Any]) -> None:
    """Plain values are found again by their path, and are no addresses, which each process has of its own."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = [t for _, _, t in state.registered(model)]
    addresses = {id(each) for each in (*modules.values(), *tensors)}
    addresses |= {parts.address(t) for t in tensors if t.layout is torch.strided} - {0}
    for path, value in plain.items():
        if path.rpartition(".")[0] not in modules:
            raise PublishError(f"loading changed {path}, which has a dot in its name")
        if type(value) is int and value in addresses:
            raise PublishError(f"{path} is an address of this process")


def _is_plain(path: str, value: Any, within: Collection[str]) -> bool:
    """False for what a parameter in parts brings itself. Raises PublishError for text or a number with more to it."""
    if type(value) in state.PLAIN:
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise PublishError(f"{path} is a number of {value.bit_length()} bits, which has no plain form")
        return True
    if path.partition("@")[0] in within:
        return False
    raise PublishError(f"{path} is a {values.type_name(type(value))}, which would come back as plain text or number")


def _split(model: nn.Module, named: list[tuple[str, Kind, torch.Tensor]]) -> dict[int, tuple[str, Parts]]:
    """Parameters that are more than one tensor, by identity: their first name and their parts."""
    found: dict[int, tuple[str, Parts]] = {}
    for name, kind, tensor in named:
        if kind is Kind.PARAMETER and id(tensor) not in found:
            pieces = parts.apart(name, tensor, model.get_submodule(name.rpartition(".")[0]))
            if pieces is not None:
                found[id(tensor)] = (name, pieces)
    return found


def _comes_along(path: str, shared: Collection[str]) -> bool:
    """Whether a tensor belongs to an object which a module shares with its parameter: that one brings it."""
    return path in shared or any(above in shared for above in _above(path))


def _shared(split: Mapping[int, tuple[str, Parts]]) -> set[str]:
    """Where modules keep what their parameters in parts keep as well."""
    return {state.join(n.rpartition(".")[0], a) for n, found in split.values() for a in found.how.get("also", ())}


def _changed(
    model: nn.Module, before: Skeleton, after: Mapping[str, str], known: Collection[str], inside: Collection[str]
) -> dict[str, Any]:
    """Attributes beyond plain values that loading set. Raises PublishError for what cannot be carried.

    `after`: the marks now. `inside`: parameters in parts, which bring their attributes themselves.
    """
    found: dict[str, Any] = {}
    for path in sorted(after.keys() | before.marks.keys()):
        if path in known or after.get(path) == before.marks.get(path):
            continue
        where, _, leaf = path.rpartition(".")
        if "@" in leaf:
            if path.rpartition("@")[0] in inside:
                continue
            raise PublishError(f"loading changed {path}, an attribute of a tensor that has no plain form")
        if path not in after:
            if leaf in vars(model.get_submodule(where)):
                continue  # a plain value now
            raise PublishError(f"loading took the attribute {path} away")
        if after[path].endswith(" hooks"):
            raise PublishError(f"loading changed {path}: hooks are not shared; register them when the module is made")
        value = getattr(model.get_submodule(where), leaf)
        found[path] = values.encode(value, f"the attribute {path}")
    for path, mark in after.items():
        other = mark.removeprefix(values.SAME)
        if other != mark and not found.keys().isdisjoint([path, other]):
            raise PublishError(f"loading changed {other}, which is {path} as well: they would be two")
    return found


def _above(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _in_parts(entries: list[Entry], split: Mapping[int, tuple[str, Parts]], into: dict[str, Any]) -> Iterator[Entry]:
    """Each part as an entry of its own; `into` gets how they go together."""
    for entry in entries:
        if id(entry.tensor) not in split:
            yield entry
            continue
        name, found = split[id(entry.tensor)]
        into[name] = {
            "names": list(entry.names), "parts": {p: parts.name_of(name, p) for p in found.tensors}, "how": found.how,
        }  # fmt: skip
        for part, tensor in found.tensors.items():
            yield replace(entry, names=(parts.name_of(name, part),), tensor=tensor)


def _is_none(model: nn.Module, name: str) -> bool:
    """Whether the module still declares the name, without a tensor."""
    prefix, _, leaf = name.rpartition(".")
    owner = model.get_submodule(prefix)
    return leaf in owner._parameters or leaf in owner._buffers


def _everything(named: list[tuple[str, Kind, torch.Tensor]], spots: list[Spot]) -> Iterator[Any]:
    yield from named
    yield from ((spot.path, Kind.ATTRIBUTE, spot.tensor) for spot in spots)


def _check_rebuildable(
    model: nn.Module,
    before: Skeleton,
    named: list[tuple[str, Kind, torch.Tensor]],
    spots: list[Spot],
    types: Mapping[str, str],
) -> None:
    after = _types(model)
    replaced = sorted(n for n in before.types.keys() | after.keys() if before.types.get(n) != after.get(n))
    if replaced:
        raise PublishError(f"loading replaced or added module {replaced[0] or '<root>'}: it must be built that way")
    kinds: dict[int, Kind] = {}
    for name, registered, tensor in named:
        if kinds.setdefault(id(tensor), registered) is not registered:
            raise PublishError(f"{name} is a {registered} here and a {kinds[id(tensor)]} elsewhere")
    names = {name for name, _, _ in named}
    for name, kind, tensor in (*named, *((s.path, Kind.ATTRIBUTE, s.tensor) for s in spots)):
        if kind is not Kind.PARAMETER and parts.apart(name, tensor, model) is not None:
            raise PublishError(f"{name} is a {values.type_name(type(tensor))} in a place of its own")
        why = parts.beside(tensor)
        if why is not None:
            raise PublishError(f"{name} {why}, which would not come back")
    for name, type_name in types.items():
        if before.tensor_types.get(name) != type_name:
            raise PublishError(f"loading made {name} a {type_name}: it must be built that way")
    kept = {id(t) for _, _, t in named} | {id(s.tensor) for s in spots if not s.weak}
    for spot in spots:
        if spot.path in names:
            raise PublishError(f"{spot.path}: two tensors would go by this name")
        owner, _, leaf = spot.path.rpartition(".")
        if leaf != str(spot.key) or not (owner in after or owner in before.places):
            raise PublishError(f"{spot.path}: it hangs where the module has nothing before it is loaded")
        fits = type(spot.key) is str if isinstance(spot.owner, dict) else not isinstance(spot.owner, tuple)
        if spot.path not in before.places and (spot.weak or not fits):
            raise PublishError(f"{spot.path}: the module has no such place before it is loaded")
        if id(spot.tensor) not in kept:
            raise PublishError(f"{spot.path} refers to a tensor that the module does not keep")


def _declared(model: nn.Module, path: str) -> Any:
    """A declared attribute in plain form. Raises PublishError if there is none, or it has no such form."""
    owner, _, leaf = path.rpartition(".")
    try:
        value = getattr(model.get_submodule(owner), leaf)
    except AttributeError:
        raise PublishError(f"declared attribute {path}: the module has none") from None
    except Exception as e:
        raise PublishError(f"declared attribute {path}: {e}") from e
    return values.encode(value, f"declared attribute {path}")
