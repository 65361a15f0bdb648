# SPDX-License-Identifier: Apache-2.0
"""The tensors that decide a processed model's result: parameters, buffers and bare tensors; see `census` for the rest.

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

from wcache.engine import state
from wcache.engine.entries import Entry
from wcache.engine.state import Spot
from wcache.engine.state import registered as registered
from wcache.engine.tensors import dtype_name
from wcache.engine.vllm import census
from wcache.model import Kind


def entries(model: nn.Module) -> list[Entry]:
    """Every tensor of a model that must be published, tied names together."""
    return state.grouped(found for found in _all(model) if not found[2].is_meta)


def _all(model: nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    yield from registered(model)
    for spot in bare(model):
        yield spot.path, Kind.ATTRIBUTE, spot.tensor


def bare(model: nn.Module) -> Iterator[Spot]:
    """Tensors that are neither parameters nor buffers, each place once, except those that are also one of these."""
    return state.bare(model, census.holds)


def hidden(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that hang where nobody could put them back, by path."""
    return census.hidden(model, [*(t for _, _, t in registered(model)), *(spot.tensor for spot in bare(model))])


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
    picked = {
        k: v.name if isinstance(v, Enum) else v.__name__
        for k, v in getattr(chosen, "__dict__", {}).items()
        if _is_choice(v)
    }
    inner = ", ".join(f"{k}={picked[k]}" for k in sorted(picked))
    return f"{type(chosen).__name__}({inner})"


def _is_choice(value: Any) -> bool:
    return isinstance(value, Enum) or (isinstance(value, type) and value.__module__.startswith("vllm."))


Shape = tuple[tuple[int, ...], str]  # and the name of the dtype
_NONE: Shape = ((0,), "")


def shape_of(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape), dtype_name(tensor.dtype)


@dataclass(frozen=True, slots=True)
class Before:
    """A model as it was built, before its weights came."""

    facts: census.Facts
    methods: dict[str, str]
    shapes: dict[str, Shape]
    bare: dict[str, Shape]
    modules: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Before:
        return cls(
            census.facts(model),
            methods(model),
            {name: shape_of(tensor) for name, _, tensor in registered(model)},
            {spot.path: shape_of(spot.tensor) for spot in bare(model)},
            frozenset(dict(model.named_modules(remove_duplicate=False))),
        )

    def removed(self, model: nn.Module) -> list[str]:
        """Modules that are gone; not those inside them."""
        gone = self.modules - dict(model.named_modules(remove_duplicate=False)).keys()
        return sorted(name for name in gone if name.rpartition(".")[0] not in gone)

    def consumed(self, model: nn.Module) -> list[str]:
        """Parameters and buffers that the processed model no longer has."""
        return sorted(self.shapes.keys() - {name for name, _, _ in registered(model)})

    def emptied(self, model: nn.Module) -> list[str]:
        """Parameters whose bytes went where nobody can see them (packed copies inside closures)."""
        now = model.named_parameters(remove_duplicate=False)
        return sorted(name for name, p in now if p.numel() == 0 and torch.Size(self.shapes.get(name, _NONE)[0]).numel())

    def reshaped(self, model: nn.Module) -> dict[str, Shape]:
        """What the parameters and buffers were that the processed model has in another shape or dtype."""
        now = ((name, shape_of(tensor)) for name, _, tensor in registered(model))
        return {name: self.shapes[name] for name, shape in now if self.shapes.get(name, shape) != shape}


def on_meta(model: nn.Module) -> list[str]:
    """Names of all tensors without memory: what vLLM leaves out of a model that is used in another way."""
    return [name for name, _, tensor in _all(model) if tensor.is_meta]
