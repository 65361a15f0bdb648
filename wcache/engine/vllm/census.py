# SPDX-License-Identifier: Apache-2.0
"""What a vLLM model is besides its tensors: every attribute of its modules, parameters and of vLLM's helper objects.

Runs in the process that loaded from disk and in the one that attaches. A census is taken before the weights come and
after they were processed; what changed between the two decides the result as much as the tensors do (flags, scalars on
the host, kernels that were picked, parameters that are None now). It travels with the shard; the attaching engine puts
back what is plain and holds everything else against its own model.
A fact is a plain value itself, or one key that says what is there: {"dtype": "int8"}, {"object": "module.Class"}. What
vLLM's own objects, configurations of its libraries, containers, functions (closures, defaults) and hooks hold has facts
of its own.
Surprising: integers inside objects that loading made are engine sizes (tokens per step, workspaces), not weights: they
are the attaching engine's own and are not compared.
"""

from __future__ import annotations

import ast
import functools
import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from wcache.engine import values
from wcache.engine.state import MAX_DEPTH, OWN, PLAIN, join, registered

FORM = 3  # of what a shard says of its model; part of the key: what another version of wcache wrote is another shard
GONE = {"gone": ""}
CLASS = "class"  # the key that names the class of a module or parameter
PLAIN_PARAMETER = {"class": "torch.nn.parameter.Parameter"}

_IGNORED = frozenset({"weight_loader", "_weight_loader", "_wcache_attachment"})  # how it is loaded is no state of it
_AFTERWARDS = frozenset({"training"})  # set by vLLM after the load, in all modules that it sees
NOTES = ("_dynamo_", "_tensor_constant")  # begin what torch's compiler and tracer leave where they looked first
_NOT_STATE = ("vllm.config", "vllm.compilation", "vllm.distributed", "vllm.platforms", "vllm.v1.worker", "vllm.logger",
              "vllm.lora")  # fmt: skip
_TRANSFORMERS = ("transformers", "transformers_modules")
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (dict, set, frozenset, *_SEQUENCES)
_SHOWN = (bytes, bytearray, complex, range, slice, Fraction)  # wholly, by repr()

Facts = dict[str, Any]


def holds(value: Any) -> bool:
    """Whether a helper object belongs to the model: vLLM's own, except what many models share."""
    home = type(value).__module__
    return home.startswith("vllm.") and not home.startswith(_NOT_STATE)


@dataclass(slots=True)
class Names:
    """What a model calls its modules, parameters and buffers, by their identity."""

    modules: dict[str, nn.Module]
    of_module: dict[int, str]
    of_tensor: dict[int, str]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        modules, tensors = dict(model.named_modules()), {name: tensor for name, _, tensor in registered(model)}
        of_tensor: dict[int, str] = {}
        for name, tensor in tensors.items():
            of_tensor.setdefault(id(tensor), name)
        return cls(modules, {id(m): name for name, m in modules.items()}, of_tensor, tensors)

    def fact(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self.of_tensor.get(id(value), "")}
        if id(value) in self.of_module:
            return {"module": self.of_module[id(value)]}
        return _fact(value)


def facts(model: nn.Module) -> Facts:
    """Every fact of a model, by path."""
    names = Names.of(model)
    return {path: names.fact(value) for path, value in _everything(names)}


def hidden(model: nn.Module, known: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors beside the known ones, by path: in functions, slots, sets, or in attributes of other tensors."""
    ids = set(map(id, known))
    found = ((path, value) for path, value in _everything(Names.of(model)) if isinstance(value, torch.Tensor))
    return {path: tensor for path, tensor in found if id(tensor) not in ids}


def _everything(names: Names) -> Iterator[tuple[str, Any]]:
    """What a model is besides its parameters and buffers, each thing once with all that hangs on it, by path."""
    seen = set[int]()
    for name, module in names.modules.items():
        yield f"{name}@{CLASS}", type(module)
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            where = join(name, leaf)
            if tensor is None:
                yield where, None
                continue
            if isinstance(tensor, nn.Parameter):
                yield f"{where}@{CLASS}", type(tensor)
            for key, value in _items(tensor):
                yield f"{where}@{key}", value
                yield from _walk(value, f"{where}@{key}", names, seen, 1, tensor)
        for leaf, child in module._modules.items():
            if names.of_module.get(id(child)) != join(name, leaf):  # none, or known by another name
                yield join(name, leaf), child
        yield from _walk(module, name, names, seen, 0)


def _walk(
    owner: Any, path: str, names: Names, seen: set[int], depth: int, above: Any = None
) -> Iterator[tuple[str, Any]]:
    """What hangs on an object that is looked into; `above`: what it hangs on itself."""
    of_module = depth == 0
    if id(owner) in seen or depth > MAX_DEPTH:
        return
    if not of_module and (id(owner) in names.of_module or not _opens(owner)):
        return
    if isinstance(owner, types.MethodType) and owner.__self__ is above:
        return
    seen.add(id(owner))
    for key, value in _items(owner, registered_module=of_module):
        where = f"{path}[{_quoted(key)}]" if isinstance(owner, _CONTAINERS) else join(path, str(key))
        yield where, value
        yield from _walk(value, where, names, seen, depth + 1, owner)


def _opens(value: Any) -> bool:
    """Whether what it holds has facts of its own."""
    if isinstance(value, _CONTAINERS):
        return bool(value) and (_is_hooks(value) or _container(value) is None)
    if isinstance(value, type | torch.Tensor | Enum):
        return False
    return isinstance(value, (nn.Module, *_CALLABLE)) or holds(value) or _is_configuration(type(value))


def _is_configuration(kind: type) -> bool:
    """Of Transformers, or of compressed-tensors, which vLLM's methods keep."""
    library = kind.__module__.partition(".")[0]
    return library == "compressed_tensors" or (library in _TRANSFORMERS and kind.__name__.endswith("Config"))


def _items(owner: Any, *, registered_module: bool = False) -> list[tuple[Any, Any]]:
    """What hangs on an object; of a registered module not what it registers, which has names of its own."""
    if _is_hooks(owner):
        return list(enumerate(owner.values()))
    if isinstance(owner, dict):
        return _sorted((_key(k), v) for k, v in owner.items())
    if isinstance(owner, set | frozenset):
        return list(enumerate(sorted(owner, key=lambda v: _words(_fact(v)))))
    if isinstance(owner, _SEQUENCES):
        return list(enumerate(owner))
    if isinstance(owner, _CALLABLE):
        return _given(owner)
    left_out = _IGNORED | OWN | _AFTERWARDS if registered_module else _IGNORED
    own = values.fields(owner)
    return _sorted((k, v) for k, v in own if k not in left_out and not k.startswith(NOTES))


def _sorted(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """What hangs in two places goes by the same one wherever it was put there in another order."""
    return sorted(items, key=lambda item: str(item[0]))


def _is_hooks(value: Any) -> bool:
    """Torch counts up the keys of a module's hooks."""
    return type(value) is OrderedDict and all(type(k) is int for k in value)


def _key(key: Any) -> Any:
    return key if type(key) in PLAIN else _words(_fact(key))


def _quoted(key: Any) -> str:
    """A key of a container as a path's step; `_last_step` reads it."""
    return repr(key).replace("[", r"\x5b").replace("@", r"\x40")


def _given(function: Any) -> list[tuple[str, Any]]:
    """What a function has been given to work with besides its arguments."""
    if isinstance(function, types.MethodType):
        return [("__self__", function.__self__), ("__func__", function.__func__)]
    if isinstance(function, functools.partial):
        return [("func", function.func), ("args", function.args), ("keywords", function.keywords)]
    if not isinstance(function, types.FunctionType):
        return []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [
        *((name, cell.cell_contents) for name, cell in cells if _is_filled(cell)),
        *((f"__default{i}__", value) for i, value in enumerate(function.__defaults__ or ())),
        *(function.__kwdefaults__ or {}).items(),
    ]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _fact(value: Any) -> Any:
    if _is_plain(value):
        return value
    if type(value) in (float, int):
        return {type(value).__name__: str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, Enum):
        return {"enum": f"{_name(type(value))}.{value.name}"}
    if isinstance(value, type):
        return {"class": _name(value)}
    if isinstance(value, _CALLABLE) or type(value).__module__ == "torch._ops":
        return _callable(value)
    return _container(value) or _object(value)


def _callable(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return {"method": value.__func__.__qualname__}
    if isinstance(value, functools.partial):
        return {"callable": "partial"}
    if not isinstance(value, types.FunctionType):
        return {"callable": getattr(value, "__qualname__", str(value))}
    line = value.__code__.co_firstlineno  # tells two lambdas of one function apart
    return {"callable": f"{value.__module__}.{value.__qualname__}:{line}"}


def _container(value: Any) -> Any:
    """A list, tuple, set or dict of plain values, as itself; hooks as their number."""
    if _is_hooks(value):
        return {"hooks": len(value)}
    if type(value) in (list, tuple, torch.Size) and all(map(_is_plain, value)):
        return {"list" if type(value) is list else "tuple": list(value)}
    if type(value) is set and all(type(v) is str for v in value):
        return {"set": sorted(value)}
    if type(value) is dict and all(type(k) is str and _is_plain(v) for k, v in value.items()):
        return {"dict": dict(value)}
    return None


def _is_plain(value: Any) -> bool:
    """Whether a manifest can hold the value as it is."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    return type(value) in PLAIN and (type(value) is not int or -(2**63) <= value < 2**64)


def _object(value: Any) -> Any:
    """An object by its class, and those of which nothing else is said by what they are."""
    name = _name(type(value))
    if isinstance(value, _SHOWN):
        return {"object": f"{name} {value!r}"}
    return {"object": " ".join([name, *(values.bytes_of(value) or ())])}


def _name(kind: type) -> str:
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"  # what exec() makes may have no module


# --- what loading changed ---------------------------------------------------------------------------------------------


def changes(before: Facts, after: Facts) -> Facts:
    """What is new, different, or GONE after the weights were loaded and processed."""
    found = {path: fact for path, fact in after.items() if path not in before or not same(before[path], fact)}
    return found | {path: GONE for path in before.keys() - after.keys()}


def same(a: Any, b: Any) -> bool:
    """Whether two facts are one: True is not 1, and zero is not minus zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


def unrestorable(changed: Facts, prefixes: Iterable[str] | None = None) -> str | None:
    """The first change below one of the modules, or anywhere, that only vLLM itself could make again, in words."""
    below = ("",) if prefixes is None else tuple(f"{prefix}{step}" for prefix in prefixes for step in ".@")
    for path, fact in sorted(changed.items()):
        if path.startswith(below) and not _plain(fact) and fact != PLAIN_PARAMETER:
            return f"{path} ({', '.join(f'{k} {v}' for k, v in fact.items())})"
    return None


_KINDS = frozenset({"object", "callable", "class", "enum", "device", "module", "hooks"})  # only vLLM makes these


def _plain(fact: Any) -> bool:
    """Whether `_value` can make it again without vLLM."""
    return not isinstance(fact, dict) or not _KINDS & fact.keys()


class Places:
    """What stands at a path of a model now; looks only at what it is asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.names = Names.of(model)
        self._found: dict[str, Any] = {**self.names.modules}

    def fact(self, path: str) -> Any:
        owner, key = self.split(path)
        if path.endswith(f"@{CLASS}") and isinstance(owner, nn.Parameter | nn.Module):
            return {"class": _name(type(owner))}
        value = _get(owner, key)
        if isinstance(value, torch.Tensor) and isinstance(owner, nn.Module) and key not in vars(owner):
            return GONE  # parameters and buffers are no facts
        return GONE if value is _NOTHING else self.names.fact(value)

    def split(self, path: str) -> tuple[Any, Any]:
        """The object that a path's last step belongs to, or _NOTHING, and the step."""
        where, key = _last_step(path)
        return self._object(where), key

    def _object(self, path: str) -> Any:
        if path not in self._found:
            where, key = _last_step(path)
            self._found[path] = _get(self._object(where), key) if path else _NOTHING
        return self._found[path]


_NOTHING, _KEEP = object(), object()


def _last_step(path: str) -> tuple[str, Any]:
    if path.endswith("]"):
        at = path.rfind("[")
        return path[:at], ast.literal_eval(path[at + 1 : -1])
    at = max(path.rfind("."), path.rfind("@"))
    return path[: max(at, 0)], path[at + 1 :]


def _get(owner: Any, key: Any) -> Any:
    if owner is _NOTHING:
        return _NOTHING
    if isinstance(owner, (*_CONTAINERS, *_CALLABLE)):
        return dict(_items(owner)).get(key, _NOTHING)
    own = getattr(owner, "__dict__", {})
    for among in (own, own.get("_parameters", {}), own.get("_buffers", {}), own.get("_modules", {})):
        if key in among:
            return among[key]
    return getattr(owner, key, _NOTHING) if key in values.slots(type(owner)) else _NOTHING


def restore(model: nn.Module, changed: Facts) -> None:
    """Put back what is plain. Tensors must be bound already."""
    places, made = Places(model), _made(changed)
    for path, fact in changed.items():
        if path.endswith(f"@{CLASS}") or not _plain(fact) or (type(fact) is int and _inside(path, made)):
            continue
        owner, key = places.split(path)
        if owner is _NOTHING or same(places.fact(path), fact):
            continue
        if fact == GONE:
            _remove(owner, key)
        elif (value := _value(fact, owner, places.names.tensors)) is not _KEEP:
            _put(owner, key, value)


def _value(fact: Any, owner: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(fact, dict):
        return fact
    [(kind, said)] = fact.items()
    if kind == "method":
        return getattr(owner, said.rpartition(".")[2], _KEEP)
    if kind == "tensor":  # what is no parameter or buffer has been captured, and is put back with the tensors
        return tensors.get(said, _KEEP)
    make: dict[str, Callable[[Any], Any]] = {
        "dtype": lambda name: getattr(torch, name), "float": float, "int": int, "list": list, "tuple": tuple,
        "set": set, "dict": dict,
    }  # fmt: skip
    return make[kind](said)


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict | list):
        owner[key] = value
    elif not isinstance(owner, (*_CONTAINERS, *_CALLABLE)):
        setattr(owner, key, value)


def _remove(owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(key, None)
    elif not isinstance(owner, (*_CONTAINERS, *_CALLABLE)) and key in vars(owner):
        delattr(owner, key)


def differences(model: nn.Module, changed: Facts) -> list[str]:
    """One sentence for each change that loading made there and that is not so here."""
    places, made = Places(model), _made(changed)
    found = []
    for path, fact in changed.items():
        here = places.fact(path)
        if not same(here, fact) and not (type(here) is type(fact) is int and _inside(path, made)):
            found.append(f"{path}: {_words(here)} here, {_words(fact)} where it was loaded")
    return sorted(found)


def _made(changed: Facts) -> set[str]:
    """Where objects hang that loading made: what is inside is new as well."""
    return {path for path, fact in changed.items() if isinstance(fact, dict) and "object" in fact}


def _inside(path: str, made: set[str]) -> bool:
    while path := _last_step(path)[0]:
        if path in made:
            return True
    return False


def _words(fact: Any) -> str:
    return repr(fact) if not isinstance(fact, dict) else " ".join(f"{k} {v}".strip() for k, v in fact.items())
