# SPDX-License-Identifier: Apache-2.0
"""Putting what was taken of a loaded module onto an equal skeleton; see `snapshot` for the taking.

Runs in engines. Everything is checked before anything is touched, in two steps, so that several processes can agree in
between. What is left without memory in the end is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from wcache.engine import parts, state, values
from wcache.engine.snapshot import BARE, GONE, GRAD, NONE, ORDER, PARTS, TENSOR_TYPES, UNSET, VALUES, Skeleton
from wcache.engine.state import Spot
from wcache.errors import StructureError, listed
from wcache.model import Kind
from wcache.weights.manifest import Manifest


def restore(
    model: nn.Module, before: Skeleton, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """Check what was taken against an equal skeleton; the result, called, puts it there. Raises StructureError.

    `before`: what `skeleton` said of this very module.
    Parameters stand on `tensors` with the class and attributes that the skeleton gave them.
    """
    bare = set(manifest.extra.get(BARE, ()))
    modules = dict(model.named_modules(remove_duplicate=False))
    _check(before, manifest, bare, modules)
    grad = set(manifest.extra.get(GRAD, ()))
    composed = manifest.extra.get(PARTS, {})
    made = {name: _put_together(modules, name, said, tensors, name in grad) for name, said in composed.items()}
    carried = {path: values.decode(v) for path, v in manifest.extra.get(VALUES, {}).items()}

    def put() -> None:
        _put(model, manifest, tensors, modules, before.places, made)
        _set_values(modules, carried)
        _sort(modules, manifest.extra.get(ORDER, {}))

    return put


def _put(
    model: nn.Module,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, nn.Module],
    places: Mapping[str, Spot],
    made: Mapping[str, nn.Parameter],
) -> None:
    bare: dict[str, Any] = dict.fromkeys(manifest.extra.get(BARE, ()))
    grad = set(manifest.extra.get(GRAD, ()))
    composed, types = manifest.extra.get(PARTS, {}), manifest.extra.get(TENSOR_TYPES, {})
    split = {part for said in composed.values() for part in said["parts"].values()}
    found: list[tuple[tuple[str, ...], Kind, torch.Tensor]]
    found = [(tuple(said["names"]), Kind.PARAMETER, made[name]) for name, said in composed.items()]
    for spec in manifest.tensors:
        if spec.name not in split:
            old = next((o for name in spec.names if (o := _old(modules, places, name)) is not None), None)
            value = _like(old, tensors[spec.name], spec.kind, types.get(spec.name), grad=spec.name in grad)
            found.append((spec.names, spec.kind, value))
    for name in manifest.extra.get(GONE, ()):
        _remove(modules, name, keep_none=name in manifest.extra.get(NONE, ()))
    for names, kind, value in found:
        for name in names:
            if name in bare:
                bare[name] = value
            else:
                _register(modules, name, kind, value)
    for path, tensor in bare.items():
        _hang(modules, places, path, tensor)
    for path in manifest.extra.get(UNSET, ()):
        owner, leaf = _place(modules, path)
        getattr(owner, "__dict__", {}).pop(leaf, None)
    _set_values(modules, manifest.attributes)
    left = [name for name, _, tensor in state.registered(model) if tensor.is_meta]
    _refuse([f"{name}: left without memory" for name in left])


def _check(before: Skeleton, manifest: Manifest, bare: set[str], modules: Mapping[str, Any]) -> None:
    split = manifest.extra.get(PARTS, {})
    pieces = {name for said in split.values() for name in said["parts"].values()}
    carried = {name for spec in manifest.tensors for name in spec.names if name not in pieces}
    carried |= {name for said in split.values() for name in said["names"]}
    problems = [f"{n}: not in the shard" for n in before.names - carried - set(manifest.extra.get(GONE, ()))]
    for name in carried:
        owner = name.rpartition(".")[0]
        if owner not in modules and not (name in bare and (name in before.places or owner in before.places)):
            problems.append(f"{name}: nothing here that it belongs to")
    _refuse(sorted(problems))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise StructureError(f"module and shard do not agree: {listed(problems)}", problems)


def _old(modules: Mapping[str, nn.Module], places: Mapping[str, Spot], name: str) -> torch.Tensor | None:
    """What the skeleton has under a name."""
    if name in places:
        found = places[name].tensor
        return found if isinstance(found, torch.Tensor) else None
    prefix, _, leaf = name.rpartition(".")
    owner = modules.get(prefix)
    return None if owner is None else owner._parameters.get(leaf, owner._buffers.get(leaf))


def _like(
    old: torch.Tensor | None, tensor: torch.Tensor, kind: Kind, type_name: str | None, *, grad: bool
) -> torch.Tensor:
    """`tensor` with the attributes of the one it replaces, and its class if that is what was published."""
    chosen: type[torch.Tensor] = nn.Parameter if kind is Kind.PARAMETER else torch.Tensor
    if old is not None and values.type_name(type(old)) == type_name:
        chosen = type(old)
    made = torch.Tensor._make_subclass(chosen, tensor, grad)
    made.__dict__.update({} if old is None else vars(old))
    return made


def _put_together(
    modules: Mapping[str, nn.Module], name: str, said: Any, tensors: Mapping[str, torch.Tensor], grad: bool
) -> nn.Parameter:
    prefix, _, leaf = name.rpartition(".")
    try:
        pieces = {part: tensors[spec] for part, spec in said["parts"].items()}
        old = modules[prefix]._parameters.get(leaf)
        return parts.together(said["how"], pieces, old, modules[prefix], grad=grad)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise StructureError(f"{name} cannot be put together: {type(e).__name__}: {e}") from e


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
    elif not isinstance(owner, list):
        vars(owner)[leaf] = tensor
    elif int(leaf) == len(owner):
        owner.append(tensor)
    else:
        raise StructureError(f"{path}: the list has {len(owner)} items")


def _set_values(modules: Mapping[str, nn.Module], found: Mapping[str, Any]) -> None:
    for path, value in found.items():
        owner, leaf = _place(modules, path)
        if leaf in getattr(owner, "__dict__", ()):
            vars(owner)[leaf] = value  # a property may hide it
        elif owner is not None:
            setattr(owner, leaf, value)


def _place(modules: Mapping[str, nn.Module], path: str) -> tuple[Any, str]:
    """The module or tensor that an attribute ("layer.scale", "layer.weight@note") belongs to, and the attribute."""
    where, _, leaf = path.rpartition(".")
    if "@" not in leaf:
        return modules.get(where), leaf
    tensor, _, leaf = leaf.rpartition("@")
    return getattr(modules.get(where), tensor, None), leaf


def _sort(modules: Mapping[str, nn.Module], order: Mapping[str, Any]) -> None:
    for name, (parameters, buffers, children, non_persistent) in order.items():
        owner: Any = modules[name]
        owner._non_persistent_buffers_set = set(non_persistent)
        pairs = ((owner._parameters, parameters), (owner._buffers, buffers), (owner._modules, children))
        for registry, names in pairs:
            items = {key: registry.get(key) for key in names}
            registry.clear()
            registry.update(items)
