# SPDX-License-Identifier: Apache-2.0
"""What a vLLM model is besides its tensors: every attribute of its modules, parameters and of vLLM's helper objects.

Runs in the process that loaded from disk and in the one that attaches. A census is taken before the weights come and
after they were processed; what changed between the two decides the result as much as the tensors do (flags, scalars on
the host, kernels that were picked, parameters that are None now). It travels with the shard; the attaching engine puts
back what is plain and holds everything else against its own model.
A fact is a plain value itself, or one key that says what is there: {"dtype": "int8"}, {"object": "module.Class"}.
Surprising: integers inside objects that loading made are engine sizes (tokens per step, workspaces), not weights: they
are the attaching engine's own and are not compared.
"""

from __future__ import annotations

import ast
import functools
import math
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from wcache.engine.state import MAX_DEPTH, OWN, PLAIN, join, registered

GONE = {"gone": ""}
CLASS = "class"  # the key that names a parameter's class
PLAIN_PARAMETER = {"class": "torch.nn.parameter.Parameter"}

# `training` is set after the load; how a parameter is loaded is no state of a loaded model.
_IGNORED = frozenset({"training", "weight_loader", "_weight_loader", "_wcache_attachment"})
_COMPILER = "_dynamo_"  # begins the notes that torch.compile leaves
_NOT_STATE = ("vllm.config", "vllm.compilation", "vllm.distributed", "vllm.platforms", "vllm.v1.worker", "vllm.logger",
              "vllm.lora")  # fmt: skip
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)

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
    names, found, seen = Names.of(model), Facts(), set[int]()
    for name, module in names.modules.items():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            where = join(name, leaf)
            if tensor is None:
                found[where] = None
            elif isinstance(tensor, nn.Parameter):
                found[f"{where}@{CLASS}"] = {"class": _name(type(tensor))}
                found |= {f"{where}@{key}": names.fact(value) for key, value in _items(tensor)}
        _walk(module, name, names, found, seen, 0)
    return found


def _walk(owner: Any, path: str, names: Names, found: Facts, seen: set[int], depth: int) -> None:
    if id(owner) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(owner))
    for key, value in _items(owner, registered_module=id(owner) in names.of_module):
        where = f"{path}[{key!r}]" if isinstance(owner, dict | list | tuple) else join(path, str(key))
        fact = found[where] = names.fact(value)
        if isinstance(fact, dict) and "object" in fact and _opens(value):
            _walk(value, where, names, found, seen, depth + 1)


def _opens(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | nn.Module) or (hasattr(value, "__dict__") and holds(value))


def _items(owner: Any, *, registered_module: bool = False) -> list[tuple[Any, Any]]:
    """What hangs on an object; of a registered module not what it registers, which has names of its own."""
    if isinstance(owner, dict):
        return [(k, v) for k, v in owner.items() if isinstance(k, str | int)]
    if isinstance(owner, list | tuple):
        return list(enumerate(owner))
    left_out = _IGNORED | OWN if registered_module else _IGNORED
    return [(k, v) for k, v in vars(owner).items() if k not in left_out and not k.startswith(_COMPILER)]


def _fact(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, Enum):
        return {"enum": f"{_name(type(value))}.{value.name}"}
    if isinstance(value, type):
        return {"class": _name(value)}
    if isinstance(value, _CALLABLE):
        return _callable(value)
    return _container(value) or {"object": _name(type(value))}


def _callable(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return {"method": value.__func__.__qualname__}
    if isinstance(value, functools.partial):
        return {"callable": f"partial {getattr(value.func, '__qualname__', '')}"}
    return {"callable": value.__qualname__}


def _container(value: Any) -> Any:
    """A list, tuple, set or dict of plain values, as itself; hooks, whose keys torch counts up, as their number."""
    if type(value) is OrderedDict and all(type(k) is int for k in value):
        return {"hooks": len(value)}
    if type(value) in (list, tuple, torch.Size) and all(type(v) in PLAIN for v in value):
        return {"list" if type(value) is list else "tuple": list(value)}
    if type(value) is set and all(type(v) is str for v in value):
        return {"set": sorted(value)}
    if type(value) is dict and all(type(k) is str and type(v) in PLAIN for k, v in value.items()):
        return {"dict": dict(value)}
    return None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# --- what loading changed ---------------------------------------------------------------------------------------------


def changes(before: Facts, after: Facts) -> Facts:
    """What is new, different, or GONE after the weights were loaded and processed."""
    found = {path: fact for path, fact in after.items() if path not in before or not _same(before[path], fact)}
    return found | {path: GONE for path in before.keys() - after.keys()}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def unrestorable(changed: Facts, prefixes: Iterable[str] | None = None) -> str | None:
    """The first change below one of the modules, or anywhere, that only vLLM itself could make again, in words."""
    below = ("",) if prefixes is None else tuple(f"{prefix}." for prefix in prefixes)
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
        if path.endswith(f"@{CLASS}") and isinstance(owner, nn.Parameter):
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
    where, _, key = path.rpartition("@" if "@" in path else ".")
    return where, key


def _get(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return owner.get(key, _NOTHING)
    if isinstance(owner, list | tuple):
        return owner[key] if key < len(owner) else _NOTHING
    own = getattr(owner, "__dict__", {})
    for among in (own, own.get("_parameters", {}), own.get("_buffers", {})):
        if key in among:
            return among[key]
    return _NOTHING


def restore(model: nn.Module, changed: Facts) -> None:
    """Put back what is plain. Tensors must be bound already."""
    places, made = Places(model), _made(changed)
    for path, fact in changed.items():
        if path.endswith(f"@{CLASS}") or not _plain(fact) or (type(fact) is int and _inside(path, made)):
            continue
        owner, key = places.split(path)
        if owner is _NOTHING or _same(places.fact(path), fact):
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
        "dtype": lambda name: getattr(torch, name), "float": float, "list": list, "tuple": tuple, "set": set,
        "dict": dict,
    }  # fmt: skip
    return make[kind](said)


def _put(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict | list):
        owner[key] = value
    elif not isinstance(owner, tuple):
        setattr(owner, key, value)


def _remove(owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(key, None)
    elif not isinstance(owner, list | tuple) and key in vars(owner):
        delattr(owner, key)


def differences(model: nn.Module, changed: Facts) -> list[str]:
    """One sentence for each change that loading made there and that is not so here."""
    places, made = Places(model), _made(changed)
    found = []
    for path, fact in changed.items():
        here = places.fact(path)
        if not _same(here, fact) and not (type(here) is type(fact) is int and _inside(path, made)):
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
