# SPDX-License-Identifier: Apache-2.0
"""A loaded module as the difference to its skeleton: taken where it was loaded, put onto the same skeleton elsewhere.

Runs in engines (plain PyTorch, Transformers). A skeleton is the module built on the meta device; its `structure` is
part of the layout key, so that a shard only ever meets the skeleton it was taken from. What cannot be put back exactly
(tensors with state of their own, modules that loading replaced, objects nobody can rebuild) is refused when it is
taken, with a reason, and nothing is published.
Surprising: a shared parameter keeps `requires_grad` as the engine has it, and a guard raises where a gradient arrives:
training is refused aloud, never detached in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wcache.engine import state
from wcache.engine.entries import Entry
from wcache.engine.state import Holds, Spot
from wcache.engine.tensors import dtype_name
from wcache.errors import PublishError, StructureError, TrainingRefused
from wcache.model import Kind
from wcache.weights.fingerprint import digest
from wcache.weights.manifest import Manifest

_NO_STATE = ("torch.", "builtins.", "collections.", "numpy.", "threading.", "logging.", "functools.", "types.")
_SHOWN = 5  # differences that a message names; the error carries all of them
_GRAD, _BARE, _GONE, _NONE, _TENSOR_TYPES = "requires_grad", "bare", "gone", "none", "parameter_types"


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
    paths: frozenset[str]  # of helper objects and containers that may hold bare tensors


def skeleton(model: nn.Module, holds: Holds = holds) -> Skeleton:
    named = list(state.registered(model))
    tensors = [[n, str(k), dtype_name(t.dtype), list(t.shape), list(t.stride())] for n, k, t in named]
    types = _types(model)
    return Skeleton(
        digest([sorted(tensors, key=str), types]),
        frozenset(name for name, _, _ in named),
        state.plain_values(model, but=frozenset()),
        types,
        frozenset(s.path for s in state.places(model, holds) if not isinstance(s.tensor, torch.Tensor)),
    )


def _types(model: nn.Module) -> dict[str, str]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in modules}


@dataclass(frozen=True, slots=True)
class Taken:
    """What is published of a loaded module: tensors, plain values that loading set, and how to put them back."""

    entries: list[Entry]
    attributes: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


def take(
    model: nn.Module, before: Skeleton, holds: Holds = holds, *, declared: Collection[str] = (), skip_meta: bool = False
) -> Taken:
    """Everything that tells a loaded module from its skeleton. Raises PublishError for what could not be put back.

    `declared`: paths of attributes that must be carried, plain values of any depth. `skip_meta`: bare tensors that
    the engine itself leaves on the meta device are left out.
    """
    named = list(state.registered(model))
    spots = [s for s in state.bare(model, holds, aliases=True) if not (skip_meta and s.tensor.is_meta)]
    _check_rebuildable(model, before, named, spots)
    entries = state.grouped(_everything(named, spots))
    values = state.changed(before.values, state.plain_values(model, but=frozenset()))
    values |= {path: _declared(model, path) for path in declared if path not in {s.path for s in spots}}
    now = {name for name, _, _ in named}
    extra = {
        _GRAD: sorted(n for n, k, t in named if k is Kind.PARAMETER and t.requires_grad),
        _BARE: sorted(s.path for s in spots),
        _GONE: sorted(before.names - now),
        _NONE: sorted(n for n in before.names - now if _is_none(model, n)),
        _TENSOR_TYPES: {n: _type_name(t) for n, k, t in named if k is Kind.PARAMETER and type(t) is not nn.Parameter},
    }
    return Taken(entries, values, extra)


def _is_none(model: nn.Module, name: str) -> bool:
    """Whether the module still declares the name, without a tensor."""
    prefix, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(prefix), leaf, model) is None


def _everything(named: list[tuple[str, Kind, torch.Tensor]], spots: list[Spot]) -> Iterator[Any]:
    yield from named
    yield from ((spot.path, Kind.ATTRIBUTE, spot.tensor) for spot in spots)


def _check_rebuildable(
    model: nn.Module, before: Skeleton, named: list[tuple[str, Kind, torch.Tensor]], spots: list[Spot]
) -> None:
    after = _types(model)
    replaced = sorted(n for n in before.types.keys() | after.keys() if before.types.get(n) != after.get(n))
    if replaced:
        raise PublishError(f"loading replaced or added module {replaced[0] or '<root>'}: it must be built that way")
    names = {name for name, _, _ in named}
    for name, _, tensor in (*named, *((s.path, Kind.ATTRIBUTE, s.tensor) for s in spots)):
        _refuse_stateful(name, tensor)
    for spot in spots:
        if spot.path in names:
            raise PublishError(f"{spot.path}: two tensors would go by this name")
        owner, _, leaf = spot.path.rpartition(".")
        if leaf != str(spot.key) or not (owner in after or owner in before.paths):
            raise PublishError(f"{spot.path}: it hangs where the module has nothing before it is loaded")


def _refuse_stateful(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise PublishError(f"{name} is a {_type_name(tensor)}, a tensor subclass with state of its own")
    hidden = [k for k, v in vars(tensor).items() if not isinstance(v, state.PLAIN) and not k.startswith("__")]
    if hidden and kind not in (torch.Tensor, nn.Parameter):
        raise PublishError(f"{name} is a {_type_name(tensor)}, which keeps {hidden[0]} beside its bytes")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _declared(model: nn.Module, path: str) -> Any:
    owner, _, leaf = path.rpartition(".")
    try:
        value = getattr(model.get_submodule(owner), leaf)
        digest(value)
    except AttributeError:
        raise PublishError(f"declared attribute {path}: the module has none") from None
    except Exception as e:
        raise PublishError(f"declared attribute {path}: {e}") from e
    return value


# --- putting it back --------------------------------------------------------------------------------------------------


def restore(
    model: nn.Module, before: Skeleton, manifest: Manifest, tensors: Mapping[str, torch.Tensor], holds: Holds = holds
) -> None:
    """Put what was taken onto an equal skeleton. Raises StructureError, and then nothing was touched.

    Parameters stand on `tensors` with the class and attributes that the skeleton gave them.
    """
    bare = set(manifest.extra.get(_BARE, ()))
    modules = dict(model.named_modules(remove_duplicate=False))
    places = {s.path: s for s in state.places(model, holds)}
    _check(before, manifest, bare, modules, places)
    for name in manifest.extra.get(_GONE, ()):
        _remove(modules, name, keep_none=name in manifest.extra.get(_NONE, ()))
    grad = set(manifest.extra.get(_GRAD, ()))
    types = manifest.extra.get(_TENSOR_TYPES, {})
    for spec in manifest.tensors:
        value: torch.Tensor = tensors[spec.name]
        inside = [n for n in spec.names if n not in bare]
        if spec.kind is Kind.PARAMETER:
            value = _parameter(modules, inside[0], value, inside[0] in grad, types)
        for name in inside:
            _register(modules, name, spec.kind, value)
        for path in spec.names:
            if path in bare:
                _hang(modules, places, path, value)
    _set_values(modules, manifest.attributes)
    left = [name for name, _, tensor in state.registered(model) if tensor.is_meta]
    _refuse([f"{name}: left without memory" for name in left])


def _check(
    before: Skeleton, manifest: Manifest, bare: set[str], modules: Mapping[str, Any], places: Mapping[str, Spot]
) -> None:
    carried = {name for spec in manifest.tensors for name in spec.names}
    problems = [f"{n}: not in the shard" for n in before.names - carried - set(manifest.extra.get(_GONE, ()))]
    for name in carried:
        owner = name.rpartition(".")[0]
        if owner not in modules and not (name in bare and (name in places or owner in places)):
            problems.append(f"{name}: nothing here that it belongs to")
    _refuse(sorted(problems))


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StructureError(f"module and shard do not agree: {'; '.join(problems[:_SHOWN])}{more}", problems)


def _parameter(
    modules: Mapping[str, nn.Module], name: str, tensor: torch.Tensor, grad: bool, types: Mapping[str, str]
) -> nn.Parameter:
    prefix, _, leaf = name.rpartition(".")
    old = modules[prefix]._parameters.get(leaf)
    made = nn.Parameter(tensor, requires_grad=grad)
    if old is not None:
        if name in types and _type_name(old) == types[name]:
            made.__class__ = type(old)
        made.__dict__.update(vars(old))
    return made


def _register(modules: Mapping[str, nn.Module], name: str, kind: Kind, value: torch.Tensor) -> None:
    prefix, _, leaf = name.rpartition(".")
    owner = modules[prefix]
    if kind is Kind.PARAMETER:
        owner._buffers.pop(leaf, None)
        owner._parameters[leaf] = value  # type: ignore[assignment]
        return
    owner._parameters.pop(leaf, None)
    owner._buffers[leaf] = value
    owner._non_persistent_buffers_set.discard(leaf)
    if kind is Kind.NON_PERSISTENT:
        owner._non_persistent_buffers_set.add(leaf)


def _remove(modules: Mapping[str, nn.Module], name: str, *, keep_none: bool) -> None:
    """What loading took away; `keep_none`: it left None in its place."""
    prefix, _, leaf = name.rpartition(".")
    owner = modules[prefix]
    for registry in (owner._parameters, owner._buffers):
        if leaf in registry and keep_none:
            registry[leaf] = None
        else:
            registry.pop(leaf, None)


def _hang(modules: Mapping[str, Any], places: Mapping[str, Spot], path: str, tensor: torch.Tensor) -> None:
    if path in places:
        places[path].put(tensor)
        return
    prefix, _, leaf = path.rpartition(".")
    owner = modules[prefix] if prefix in modules else places[prefix].now()
    if isinstance(owner, dict):
        owner[leaf] = tensor
    elif isinstance(owner, list):
        owner.append(tensor)
    else:
        setattr(owner, leaf, tensor)


def _set_values(modules: Mapping[str, nn.Module], values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        where, _, attribute = path.rpartition("@") if "@" in path else path.rpartition(".")
        prefix, _, leaf = where.rpartition(".")
        owner = getattr(modules.get(prefix), leaf, None) if "@" in path else modules.get(where)
        if owner is not None:
            setattr(owner, attribute, value)


# --- no training on shared memory -------------------------------------------------------------------------------------


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """While it lasts, no parameter requires grad, so that they can be moved onto shared memory."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def guard(model: nn.Module) -> None:
    """Let a gradient that arrives at a shared parameter raise TrainingRefused; parameters moved elsewhere may train."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            parameter.register_post_accumulate_grad_hook(_refusal(name, parameter.data_ptr()))  # type: ignore[no-untyped-call]


def _refusal(name: str, address: int) -> Callable[[torch.Tensor], None]:
    def refuse(parameter: torch.Tensor) -> None:
        if parameter.data_ptr() != address:
            return
        parameter.grad = None
        raise TrainingRefused(f"a gradient for {name}, which stands on weights shared with the cache and other engines")

    return refuse
