# SPDX-License-Identifier: Apache-2.0
"""What decides a processed model's result: parameters, buffers, bare tensors, and plain values set while loading.

Runs in the process that loaded from disk (what is published) and in the one that attaches (what must be there in the
end, with no tensor left on the meta device). Bare tensors are those that modules keep as plain attributes, in lists
and dicts, or in vLLM's helper objects (attention implementations, quantization methods); a dotted path names each.
Surprising: `named_modules` gives a shared module once per name, which is how a tied weight gets all of its names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from wcache.engine.entries import Entry
from wcache.errors import StructureError
from wcache.model import Kind

MAX_DEPTH = 4  # of helper objects below a module
_NOT_STATE = ("vllm.config", "vllm.compilation", "vllm.distributed", "vllm.platforms", "vllm.v1.worker", "vllm.logger")
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a bare tensor hangs: attribute `key` of `owner`, or its item if `owner` is a list or a dict."""

    path: str
    owner: Any
    key: Any
    tensor: torch.Tensor

    def put(self, tensor: torch.Tensor) -> None:
        if isinstance(self.owner, dict | list):
            self.owner[self.key] = tensor
        elif isinstance(self.owner, tuple):
            raise StructureError(f"{self.path}: a tensor inside a tuple cannot be replaced")
        else:
            setattr(self.owner, self.key, tensor)


def entries(model: nn.Module) -> list[Entry]:
    """Every tensor of a model that must be published, tied names together."""
    names: dict[int, list[str]] = {}
    first: dict[int, tuple[Kind, torch.Tensor]] = {}
    for name, kind, tensor in _all(model):
        names.setdefault(id(tensor), []).append(name)
        first.setdefault(id(tensor), (kind, tensor))
    return [Entry(tuple(names[i]), kind, tensor) for i, (kind, tensor) in first.items()]


def _all(model: nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    yield from registered(model)
    for spot in bare(model):
        yield spot.path, Kind.ATTRIBUTE, spot.tensor


def registered(model: nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    """Parameters, then buffers, under every name they have."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, Kind.PARAMETER, parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                kind = Kind.NON_PERSISTENT if leaf in module._non_persistent_buffers_set else Kind.BUFFER
                yield join(prefix, leaf), kind, buffer


def bare(model: nn.Module) -> Iterator[Spot]:
    """Tensors that are neither parameters nor buffers, each place once, except those that are also one of these."""
    known = {id(m) for m in model.modules()}
    own = {id(t) for _, _, t in registered(model)}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for spot in _walk(module, name, known, seen, 0):
            if id(spot.tensor) not in own:
                yield spot


def _walk(owner: Any, path: str, known: set[int], seen: set[int], depth: int) -> Iterator[Spot]:
    if id(owner) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(owner))
    for key, value in _items(owner, id(owner) in known):
        where = join(path, str(key))
        if isinstance(value, torch.Tensor):
            yield Spot(where, owner, key, value)
        elif _may_hold_tensors(value) and id(value) not in known:
            yield from _walk(value, where, known, seen, depth + 1)


def _items(owner: Any, is_known_module: bool) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return [(k, v) for k, v in owner.items() if isinstance(k, str | int)]
    if isinstance(owner, list | tuple):
        return list(enumerate(owner))
    return [(k, v) for k, v in vars(owner).items() if not (is_known_module and k in _OWN)]


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return bool(value)
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    home = type(value).__module__
    return isinstance(value, nn.Module) or (home.startswith("vllm.") and not home.startswith(_NOT_STATE))


def plain_values(model: nn.Module) -> dict[str, Any]:
    """Plain attributes of modules ("layer.scale") and of parameters ("layer.weight@is_shuffled")."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found |= {join(name, k): v for k, v in vars(module).items() if k != "training" and isinstance(v, _PLAIN)}
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                where = join(name, leaf)
                found |= {f"{where}@{k}": v for k, v in vars(parameter).items() if isinstance(v, _PLAIN)}
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What loading and post-processing set: values that are new or no longer what they were."""
    return {k: v for k, v in after.items() if k not in before or not _same(before[k], v)}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or a != a)


def methods(model: nn.Module) -> dict[str, str]:
    """The kernels that vLLM chose for each layer, as far as the model tells before its weights are there."""
    found = {}
    for name, module in model.named_modules():
        chosen = [getattr(module, "quant_method", None), getattr(module, "impl", None)]
        said = [_choice(c) for c in chosen if type(c).__module__.startswith("vllm.")]
        if said:
            found[name] = " ".join(said)
    return found


def _choice(chosen: Any) -> str:
    """A class and the enum members and classes among its attributes (`unquantized_backend`, `experts_cls`)."""
    picked = {k: v.name if isinstance(v, Enum) else v.__name__ for k, v in vars(chosen).items() if _is_choice(v)}
    inner = ", ".join(f"{k}={picked[k]}" for k in sorted(picked))
    return f"{type(chosen).__name__}({inner})"


def _is_choice(value: Any) -> bool:
    return isinstance(value, Enum) or (isinstance(value, type) and value.__module__.startswith("vllm."))


@dataclass(frozen=True, slots=True)
class Before:
    """A model as it was built, before its weights came."""

    names: frozenset[str]
    values: dict[str, Any]
    methods: dict[str, str]
    sizes: dict[str, int]  # elements of each parameter

    @classmethod
    def of(cls, model: nn.Module) -> Before:
        return cls(
            frozenset(name for name, _, _ in registered(model)),
            plain_values(model),
            methods(model),
            {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)},
        )

    def consumed(self, model: nn.Module) -> list[str]:
        """Parameters and buffers that the processed model no longer has."""
        return sorted(self.names - {name for name, _, _ in registered(model)})

    def emptied(self, model: nn.Module) -> list[str]:
        """Parameters whose bytes went where nobody can see them (packed copies inside closures)."""
        now = model.named_parameters(remove_duplicate=False)
        return sorted(name for name, p in now if p.numel() == 0 and self.sizes.get(name, 0))


def on_meta(model: nn.Module) -> list[str]:
    """Names of all tensors without memory; empty ones too, since their device is wrong all the same."""
    return [name for name, _, tensor in _all(model) if tensor.is_meta]


def unshareable(model: nn.Module) -> str | None:
    """Why the model's quantization methods forbid sharing its processed weights; None if they allow it."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            return f"{type(method).__name__} of layer {name or '<root>'} has no pre-processed mode"
    return None


def join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
