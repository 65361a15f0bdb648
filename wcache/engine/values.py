# SPDX-License-Identifier: Apache-2.0
"""What modules and parameters keep besides tensors: as plain values that can be published, and as marks to compare by.

Runs in engines. `encode` and `decode` carry values of any depth exactly (a tuple stays a tuple, a dtype a dtype); types
are only looked up in packages that are named here. `marks` says of every attribute of a module what it looks like, down
to objects that nobody can carry, so that a change which loading made is carried or refused, never lost in silence.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import importlib
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import nn

from wcache.engine.state import OWN, PLAIN, Holds, Spot, attribute, join
from wcache.engine.tensors import dtype_name, dtype_of
from wcache.errors import PublishError, StructureError

_PACKAGES = ("torchao", "bitsandbytes")  # whose types are nothing but their tensors and plain values
_OBJECTS = ("bitsandbytes.functional:QuantState",)  # besides enums, dataclasses and named tuples
_UNSEEN = ("extra_repr",)  # what only print() shows
_SHOWN = (  # wholly, by repr()
    *PLAIN, bytes, bytearray, complex, range, slice, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_CHANGEABLE = (list, dict, set, bytearray, deque)
_CONTAINERS = ("collections.", "types.")  # whose objects have fields of the program's own
_MAX_DEPTH = 16
_slots: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()  # what `slots` has answered
SAME = "the same as "  # what a mark says of an object that hangs in an earlier place, too


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
    try:
        return _encode(value, name, owner, tensors, "")
    except RecursionError:
        raise PublishError(f"{name} contains itself, or is too deep") from None


def plain_attributes(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """The declared attributes that are no tensors, in plain form, by dotted name. Raises PublishError."""
    found = {name: attribute(module, name) for name in names}
    return {n: encode(v, f"attribute {n}") for n, v in found.items() if not isinstance(v, torch.Tensor)}


def _encode(value: Any, name: str, owner: nn.Module | None, tensors: dict[str, Any] | None, at: str) -> Any:
    def inside(item: Any, key: object) -> Any:
        return _encode(item, name, owner, tensors, f"{at}:{key}" if at else str(key))

    kind = type(value)
    if kind in PLAIN or kind is bytes:
        return _checked(value, name)
    if isinstance(value, torch.Tensor) and tensors is not None:
        tensors[at] = value
        return {"tensor": at}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, enum.Enum) and is_known(kind):
        return {"enum": reference(kind), "name": value.name}
    if kind in (list, tuple, torch.Size):
        return {kind.__name__: [inside(v, i) for i, v in enumerate(value)]}
    keys = PLAIN if tensors is None else (str,)  # 1 and "1" would be one place for tensors
    if kind is dict and all(type(k) in keys for k in value):
        return {"dict": {_checked(k, name): inside(v, k) for k, v in value.items()}}
    if value is owner and owner is not None:
        return {"owner": True}
    if isinstance(value, tuple) and hasattr(value, "_fields") and is_known(kind):
        return {"named": reference(kind), "items": [inside(v, k) for k, v in zip(value._fields, value, strict=True)]}
    if _is_object(kind) and hasattr(value, "__dict__"):
        return {"object": reference(kind), "fields": {k: inside(v, k) for k, v in vars(value).items()}}
    raise PublishError(f"{name} keeps a {type_name(kind)}, which has no plain form")


def _checked(value: Any, name: str) -> Any:
    """A plain value as it is. Raises PublishError for numbers and text that no manifest can hold."""
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise PublishError(f"{name} keeps a number of {value.bit_length()} bits, which has no plain form")
    if type(value) is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise PublishError(f"{name} keeps text that is no Unicode, which has no plain form")
    return value


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


def marks(model: nn.Module, holds: Holds, hanging: Iterable[Spot]) -> dict[str, str]:
    """What each attribute looks like that is neither a plain value nor a tensor, by path.

    Those of tensors too ("layer.weight@note"), also of those that hang elsewhere.
    """
    found: dict[str, str] = {}
    first: dict[int, str] = {}
    names = {id(module): name or "the root" for name, module in model.named_modules()}
    for path, key, value in _attributes(model, hanging):
        known = first.setdefault(id(value), path)
        if known == path:
            marker = _Marker(names, holds)
            found[path] = marker.hooks(value) if _is_hooks(key, value) else marker.mark(value, 0)
        else:
            found[path] = SAME + known if _can_change(value, holds) else found[known]
    return found


def _can_change(value: Any, holds: Holds) -> bool:
    """Whether it matters if it is one object in two places or two."""
    return isinstance(value, _CHANGEABLE) or (holds(value) and not isinstance(value, _SHOWN))


def _attributes(model: nn.Module, hanging: Iterable[Spot]) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of what `state` does not carry as a tensor or a plain value."""
    for name, module in model.named_modules():
        mine = vars(module)
        for key, value in fields(module):
            if key not in OWN and key not in _UNSEEN and not (key in mine and _is_carried(value)):
                yield join(name, key), key, value
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield from ((f"{join(name, leaf)}@{k}", k, v) for k, v in vars(tensor).items() if not _is_carried(v))
    for spot in hanging:
        yield from ((f"{spot.path}@{k}", k, v) for k, v in vars(spot.tensor).items())


def _is_carried(value: Any) -> bool:
    return type(value) in PLAIN or isinstance(value, torch.Tensor)


def _is_hooks(key: str, value: Any) -> bool:
    return "hooks" in key and isinstance(value, dict)


@dataclass(slots=True)
class _Marker:
    """Says what one value looks like. `names`: of the model's modules, by identity. `seen`: kept alive, by identity."""

    names: Mapping[int, str]
    holds: Holds
    seen: dict[int, Any] = field(default_factory=dict)

    def hooks(self, registered: Mapping[int, Any]) -> str:
        """Each process counts its hooks for itself."""
        return f"{[self.mark(hook, 0) for hook in registered.values()]} hooks"

    def mark(self, value: Any, depth: int) -> str:
        kind = type(value)
        if id(value) in self.names:
            return f"module {self.names[id(value)]}"
        if isinstance(value, _SHOWN):
            return f"{type_name(kind)} {value!r}"
        if id(value) in self.seen or depth > _MAX_DEPTH or isinstance(value, torch.Tensor):
            return type_name(kind)
        self.seen[id(value)] = value
        inside = self._inside(value, depth + 1)
        return type_name(kind) if inside is None else f"{type_name(kind)}({', '.join(inside)})"

    def _inside(self, value: Any, depth: int) -> list[str] | None:
        """Marks of what a value consists of. None: nobody can tell, as with most objects of torch."""

        def each(*items: Any) -> list[str]:
            return [self.mark(item, depth) for item in items]

        def named(items: Iterable[tuple[Any, Any]]) -> list[str]:
            return [f"{self.mark(k, depth)}: {self.mark(v, depth)}" for k, v in _rest(items)]

        if isinstance(value, dict | MappingProxyType):
            return named(value.items()) + named(fields(value))
        if isinstance(value, list | tuple | deque):
            return each(*(v for _, v in _rest(enumerate(value)))) + named(fields(value))
        if isinstance(value, set | frozenset):
            return sorted(each(*value)) + named(fields(value))
        if isinstance(value, functools.partial):
            return each(value.func, value.args, value.keywords)
        if isinstance(value, weakref.ReferenceType):
            return each(value())
        if isinstance(value, MethodType):
            return each(value.__func__, value.__self__)
        if isinstance(value, FunctionType):
            return [value.__qualname__, str(hash(value.__code__)), *each(*closure(value))]
        if isinstance(value, torch.jit.ScriptFunction):
            return [str(value.graph)]
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return [str(value)]
        if isinstance(value, type):
            return [type_name(value)]
        found = None if hasattr(type(value), "mask") else bytes_of(value)  # what a mask hides only its copy tells
        if found is not None:
            return found
        reduced = None if isinstance(value, nn.Module) else _reduced(value)
        if reduced is not None:
            return each(reduced)
        if self.holds(value) or isinstance(value, nn.Module) or f"{type(value).__module__}.".startswith(_CONTAINERS):
            return named(fields(value))
        return None


def fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, in its `__dict__` and in slots."""
    yield from getattr(value, "__dict__", {}).items()
    yield from ((name, getattr(value, name)) for name in slots(type(value)) if hasattr(value, name))


def slots(kind: type) -> list[str]:
    """Names of what a class keeps outside the dictionary of its objects."""
    found = _slots.get(kind)
    if found is None:
        inherited = {n for base in kind.__mro__ for n, m in vars(base).items() if isinstance(m, MemberDescriptorType)}
        found = _slots[kind] = sorted(inherited)
    return found


def closure(function: FunctionType) -> list[Any]:
    """What a function brings along besides its code."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [*cells, function.__defaults__, function.__kwdefaults__]


def _reduced(value: Any) -> Any:
    """What a type that says how it is copied says of a value (dates, patterns, random number generators)."""
    kind: Any = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    own = reduce is not None or (kind.__reduce__, kind.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__)
    if not own or kind.__module__.startswith("torch."):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python deprecates some of them
            return reduce(value) if reduce is not None else value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - whatever says that it cannot be copied
        return None


def bytes_of(value: Any) -> list[str] | None:
    """What arrays and torch's random number generators hold; None for other values."""
    if isinstance(value, torch.Generator):
        return [_digest(value.get_state().numpy().tobytes())]
    if f"{type(value).__module__}.".startswith("numpy.") and hasattr(value, "tobytes"):
        data = value.tobytes() if value.dtype.kind != "O" else repr(value.tolist()).encode()
        return [str(value.dtype), str(value.shape), _digest(data)]
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rest(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Without tensors, which are carried on their own wherever they hang."""
    return [(k, v) for k, v in items if not isinstance(v, torch.Tensor)]
