# SPDX-License-Identifier: Apache-2.0
"""What modules and parameters keep besides tensors: as plain values that can be published, and as marks to compare by.

Runs in engines. `encode` and `decode` carry values of any depth exactly (a tuple stays a tuple, a dtype a dtype); types
are only looked up in packages that are named here. `marks` says of every attribute of a module what it looks like, down
to objects that nobody can carry, so that a change which loading made is carried or refused, never lost in silence.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any

import torch
from torch import nn

from wcache.engine.state import OWN, PLAIN, Holds, join
from wcache.engine.tensors import dtype_name, dtype_of
from wcache.errors import PublishError, StructureError

_PACKAGES = ("torchao", "bitsandbytes")  # whose types are nothing but their tensors and plain values
_OBJECTS = ("bitsandbytes.functional:QuantState",)  # besides enums, dataclasses and named tuples
_UNSEEN = ("extra_repr",)  # what only print() shows
_SHOWN = (*PLAIN, bytes, bytearray, complex, range, slice, torch.dtype, torch.device, enum.Enum)  # wholly, by repr()
_CONTAINERS = ("collections.", "types.")  # whose objects have fields of the program's own
_MAX_DEPTH = 16


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_known(kind: type) -> bool:
    """Whether the type may be named in a manifest."""
    return kind.__module__.partition(".")[0] in _PACKAGES


def reference(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def type_of(name: str) -> type:
    """The type that a manifest names. Raises StructureError."""
    module, _, path = name.partition(":")
    if module.partition(".")[0] not in _PACKAGES:
        raise StructureError(f"a shard names the type {name}, which is of none of {', '.join(_PACKAGES)}")
    try:
        found: Any = importlib.import_module(module)
        for leaf in path.split("."):
            found = getattr(found, leaf)
    except (ImportError, AttributeError) as e:
        raise StructureError(f"a shard names the type {name}: {e}") from e
    if not isinstance(found, type):
        raise StructureError(f"a shard names the type {name}, which is none")
    return found


# --- coding -----------------------------------------------------------------------------------------------------------


def encode(value: Any, name: str, *, owner: nn.Module | None = None, tensors: dict[str, Any] | None = None) -> Any:
    """The value in plain form; tensors in it go to `tensors`, by place. Raises PublishError naming what has no form.

    `owner`: a module that the value may refer to.
    """
    return _encode(value, name, owner, tensors, "")


def _encode(value: Any, name: str, owner: nn.Module | None, tensors: dict[str, Any] | None, at: str) -> Any:
    def inside(item: Any, key: object) -> Any:
        return _encode(item, name, owner, tensors, f"{at}:{key}" if at else str(key))

    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor) and tensors is not None:
        tensors[at] = value
        return {"tensor": at}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, enum.Enum) and is_known(kind):
        return {"enum": reference(kind), "name": value.name}
    if kind in (list, tuple, torch.Size):
        return {kind.__name__: [inside(v, i) for i, v in enumerate(value)]}
    if kind is dict and all(type(k) is str for k in value):
        return {"dict": {k: inside(v, k) for k, v in value.items()}}
    if value is owner and owner is not None:
        return {"owner": True}
    if isinstance(value, tuple) and hasattr(value, "_fields") and is_known(kind):
        return {"named": reference(kind), "items": [inside(v, k) for k, v in zip(value._fields, value, strict=True)]}
    if _is_object(kind) and hasattr(value, "__dict__"):
        return {"object": reference(kind), "fields": {k: inside(v, k) for k, v in vars(value).items()}}
    raise PublishError(f"{name} keeps a {type_name(kind)}, which has no plain form")


def _is_object(kind: type) -> bool:
    return is_known(kind) and (dataclasses.is_dataclass(kind) or reference(kind) in _OBJECTS)


def decode(value: Any, tensors: Mapping[str, torch.Tensor] | None = None, owner: nn.Module | None = None) -> Any:
    """What `encode` was given. Raises StructureError, KeyError, TypeError for what it never made."""

    def inside(item: Any) -> Any:
        return decode(item, tensors, owner)

    match value:
        case {"tensor": place}:
            return (tensors or {})[place]
        case {"dtype": name}:
            return dtype_of(name)
        case {"enum": kind, "name": name}:
            return type_of(kind)[name]  # type: ignore[index]
        case {"list": items}:
            return [inside(v) for v in items]
        case {"tuple": items}:
            return tuple(inside(v) for v in items)
        case {"Size": items}:
            return torch.Size(items)
        case {"dict": items}:
            return {k: inside(v) for k, v in items.items()}
        case {"owner": True}:
            return owner
        case {"named": kind, "items": items}:
            return type_of(kind)(*(inside(v) for v in items))
        case {"object": kind, "fields": fields}:
            found = type_of(kind)
            if not _is_object(found):
                raise StructureError(f"a shard names the type {kind}, which is no value")
            made: Any = object.__new__(found)
            made.__dict__.update({k: inside(v) for k, v in fields.items()})
            return made
    return value


# --- marks ------------------------------------------------------------------------------------------------------------


def marks(model: nn.Module, holds: Holds) -> dict[str, str]:
    """What each attribute looks like that is neither a plain value nor a tensor nor a module, by path.

    Those of parameters and buffers too ("layer.weight@note").
    """
    found: dict[str, str] = {}
    known: dict[int, str] = {}
    for path, key, value in _attributes(model):
        if type(value) in PLAIN or isinstance(value, torch.Tensor | nn.Module):
            continue
        if id(value) not in known:
            known[id(value)] = f"{len(value)} hooks" if _is_hooks(key, value) else _mark(value, holds, set(), 0)
        found[path] = known[id(value)]
    return found


def _attributes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for name, module in model.named_modules():
        yield from ((join(name, k), k, v) for k, v in vars(module).items() if k not in OWN and k not in _UNSEEN)
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield from ((f"{join(name, leaf)}@{k}", k, v) for k, v in vars(tensor).items())


def _is_hooks(key: str, value: Any) -> bool:
    return "hooks" in key and isinstance(value, dict)


def _mark(value: Any, holds: Holds, seen: set[int], depth: int) -> str:
    kind = type(value)
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, _SHOWN):
        return f"{kind.__name__} {value!r}"
    if depth > _MAX_DEPTH:
        return type_name(kind)

    def mark(item: Any) -> str:
        return _mark(item, holds, seen, depth + 1)

    if isinstance(value, dict):
        inside = [f"{mark(k)}: {mark(v)}" for k, v in _rest(value.items())]
    elif isinstance(value, list | tuple | deque):
        inside = [mark(v) for _, v in _rest(enumerate(value))]
    elif isinstance(value, set | frozenset):
        inside = sorted(map(mark, value))
    elif isinstance(value, functools.partial):
        inside = [mark(v) for v in (value.func, value.args, value.keywords)]
    elif hasattr(value, "__qualname__"):
        return f"{kind.__name__} {value.__module__}.{value.__qualname__}"
    elif id(value) not in seen and (holds(value) or f"{kind.__module__}.".startswith(_CONTAINERS)):
        seen.add(id(value))
        inside = [f"{k}: {mark(v)}" for k, v in _rest(_fields(value))]
    else:
        return _contents(value)
    return f"{type_name(kind)}({', '.join(inside)})"


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    slots = {n for kind in type(value).__mro__ for n, m in vars(kind).items() if isinstance(m, MemberDescriptorType)}
    yield from ((name, getattr(value, name)) for name in sorted(slots) if hasattr(value, name))


def _contents(value: Any) -> str:
    """Arrays and random number generators by their bytes; of other objects of libraries nothing is known."""
    name = type_name(type(value))
    if isinstance(value, torch.Generator):
        return f"{name} {hashlib.sha256(value.get_state().numpy().tobytes()).hexdigest()}"
    if name.startswith("numpy.") and hasattr(value, "tobytes"):
        data = value.tobytes() if value.dtype.kind != "O" else repr(value.tolist()).encode()
        return f"{name} {value.dtype} {value.shape} {hashlib.sha256(data).hexdigest()}"
    return name


def _rest(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Without tensors, which are carried on their own wherever they hang."""
    return [(k, v) for k, v in items if not isinstance(v, torch.Tensor)]
