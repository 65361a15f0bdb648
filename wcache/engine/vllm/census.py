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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from wcache.engine.state import OWN, PLAIN, join, registered

MAX_DEPTH = 6  # of helper objects below a module
GONE = {"gone": ""}
CLASS = "class"  # the key that names a parameter's class
PLAIN_PARAMETER = {"class": "torch.nn.parameter.Parameter"}

# `training` is set after the load; how a parameter is loaded is no state of a loaded model.
_IGNORED = frozenset({"training", "weight_loader", "_weight_loader", "_wcache_attachment"})
_NOT_STATE = ("vllm.config", "vllm.compilation", "vllm.distributed", "vllm.platforms", "vllm.v1.worker", "vllm.logger")
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)

Facts = dict[str, Any]


def holds(value: Any) -> bool:
    """Whether a helper object belongs to the model: vLLM's own, except what many models share."""
    home = type(value).__module__
    return home.startswith("vllm.") and not home.startswith(_NOT_STATE)


@dataclass(slots=True)
class Census:
    """`facts` by path; `owners`: the module, parameter, helper object or container behind each path that has any."""

    facts: Facts = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Census:
        census, walk = cls(), _Walk(model)
        for name, module in model.named_modules():
            census.owners[name] = module
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                where = join(name, leaf)
                if tensor is None:
                    census.facts[where] = None
                elif isinstance(tensor, nn.Parameter):
                    census.owners[where] = tensor
                    census.facts[f"{where}@{CLASS}"] = {"class": _name(type(tensor))}
                    for key, value in _items(tensor):
                        census.facts[f"{where}@{key}"] = walk.fact(value)
            walk.into(module, name, census)
        return census


@dataclass(slots=True)
class _Walk:
    model: nn.Module
    modules: dict[int, str] = field(init=False)
    names: dict[int, str] = field(init=False)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.modules = {id(m): name for name, m in self.model.named_modules()}
        self.names = {}
        for name, _, tensor in registered(self.model):
            self.names.setdefault(id(tensor), name)

    def into(self, owner: Any, path: str, census: Census, depth: int = 0) -> None:
        if id(owner) in self.seen or depth > MAX_DEPTH:
            return
        self.seen.add(id(owner))
        for key, value in _items(owner):
            where = f"{path}[{key!r}]" if isinstance(owner, dict | list | tuple) else join(path, str(key))
            fact = census.facts[where] = self.fact(value)
            if isinstance(fact, dict) and "object" in fact and self._opens(value):
                census.owners[where] = value
                self.into(value, where, census, depth + 1)

    def fact(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self.names.get(id(value), "")}
        if id(value) in self.modules:
            return {"module": self.modules[id(value)]}
        return _fact(value)

    def _opens(self, value: Any) -> bool:
        return isinstance(value, dict | list | tuple | nn.Module) or (hasattr(value, "__dict__") and holds(value))


def _items(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return [(k, v) for k, v in owner.items() if isinstance(k, str | int)]
    if isinstance(owner, list | tuple):
        return list(enumerate(owner))
    own = OWN if isinstance(owner, nn.Module) else ()
    return [(k, v) for k, v in vars(owner).items() if k not in _IGNORED and k not in own]


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
    """A list, tuple, set or dict of plain values, as itself."""
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


def unrestorable(changed: Facts, prefixes: Iterable[str]) -> str | None:
    """The first change below one of the modules that only vLLM's own post-processing could make again, in words."""
    below = tuple(f"{prefix}." for prefix in prefixes)
    for path, fact in sorted(changed.items()):
        if path.startswith(below) and not _plain(fact) and fact != PLAIN_PARAMETER:
            return f"{path} ({', '.join(f'{k} {v}' for k, v in fact.items())})"
    return None


def _plain(fact: Any) -> bool:
    """Whether `_value` can make it again without vLLM."""
    return not isinstance(fact, dict) or not {"object", "callable", "class", "enum", "device", "module"} & fact.keys()


def restore(model: nn.Module, changed: Facts) -> None:
    """Put back what is plain. Tensors must be bound already."""
    census, tensors = Census.of(model), {name: tensor for name, _, tensor in registered(model)}
    made = _made(changed)
    for path, fact in changed.items():
        if path in census.facts and _same(census.facts[path], fact):
            continue
        owner, key = _split(path, census.owners)
        if owner is None or (path.startswith(made) and type(fact) is int) or not _settable(path, fact):
            continue
        if fact == GONE:
            _remove(owner, key)
        else:
            value = _value(fact, owner, tensors)
            if value is not _KEEP:
                _put(owner, key, value)


def _settable(path: str, fact: Any) -> bool:
    return not path.endswith(f"@{CLASS}") and _plain(fact)


def _split(path: str, owners: Mapping[str, Any]) -> tuple[Any, Any]:
    """The object that a path's last step belongs to, if there is one here, and the step."""
    if path.endswith("]"):
        at = path.rfind("[")
        return owners.get(path[:at]), ast.literal_eval(path[at + 1 : -1])
    if "@" in path:
        where, _, key = path.rpartition("@")
        return owners.get(where), key
    where, _, key = path.rpartition(".")
    return owners.get(where), key


_KEEP = object()


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
    here, made = Census.of(model).facts, _made(changed)
    return sorted(_differences(here, changed, made))


def _differences(here: Facts, changed: Facts, made: tuple[str, ...]) -> Iterator[str]:
    for path, fact in changed.items():
        found = here.get(path, GONE)
        if _same(found, fact) or (path.startswith(made) and type(found) is type(fact) is int):
            continue
        yield f"{path}: {_words(found)} here, {_words(fact)} where it was loaded"


def _made(changed: Facts) -> tuple[str, ...]:
    """Where objects hang that loading made: what is inside is new as well."""
    paths = [path for path, fact in changed.items() if isinstance(fact, dict) and "object" in fact]
    return tuple(f"{path}{step}" for path in paths for step in ".[")


def _words(fact: Any) -> str:
    return repr(fact) if not isinstance(fact, dict) else " ".join(f"{k} {v}".strip() for k, v in fact.items())
