# SPDX-License-Identifier: Apache-2.0
"""Parameters that are more than their bytes: taken apart into plain tensors and plain values, and put together again.

Runs in engines. Three kinds: wrapper subclasses that name their inner tensors by torch's own protocol (torchao),
parameters that keep tensors and values in attributes (bitsandbytes), and torch's DTensor, whose placement the skeleton
has already. Whatever is taken apart is put together once and compared before it is published; what does not come back
equal is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wcache.engine import values
from wcache.engine.state import PLAIN
from wcache.engine.values import type_name
from wcache.errors import PublishError, StructureError

OWN = ""  # the part that is the parameter itself


@dataclass(frozen=True, slots=True)
class Parts:
    """`tensors`: plain tensors by part. `how`: plain values, all that `together` needs besides."""

    tensors: dict[str, torch.Tensor]
    how: dict[str, Any]


def name_of(parameter: str, part: str) -> str:
    """The name under which a part is published."""
    return f"{parameter}:{part}" if part else parameter


def apart(name: str, parameter: torch.Tensor, owner: nn.Module) -> Parts | None:
    """None for a plain tensor. Raises PublishError for one that could not be put together again exactly."""
    kind = type(parameter)
    if is_dtensor(parameter):
        dtensor: Any = parameter
        return Parts({"local": _plain(name, dtensor._local_tensor)}, {"placement": placement(parameter)})
    dispatches = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    hidden = [k for k, v in vars(parameter).items() if not isinstance(v, PLAIN) and not k.startswith("__")]
    if not dispatches and (not hidden or kind in (torch.Tensor, nn.Parameter)):
        return None
    if not values.is_known(kind):
        if dispatches:
            raise PublishError(f"{name} is a {type_name(kind)}, a tensor subclass with state of its own")
        raise PublishError(f"{name} is a {type_name(kind)}, which keeps {hidden[0]} beside its bytes")
    found = _taken(name, parameter, owner)
    _prove(name, parameter, owner, found)
    return found


def beside(tensor: torch.Tensor) -> str | None:
    """What a tensor has besides elements, class and attributes, which nobody could put back."""
    if type(tensor) in weakref.ProxyTypes:
        return "is a weak proxy"
    if tensor.is_inference():
        return "was made in inference mode"
    if tensor.is_leaf and tensor.grad is not None:
        return "has a gradient"
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return "has hooks of its own"
    return None


def is_dtensor(value: Any) -> bool:
    return type(value).__qualname__ == "DTensor" and hasattr(value, "_local_tensor")


def placement(dtensor: Any) -> dict[str, Any]:
    """What a DTensor is besides its local tensor, as plain values."""
    mesh = dtensor.device_mesh
    return {
        "placements": [str(p) for p in dtensor.placements],
        "mesh": [list(mesh.shape), list(mesh.mesh_dim_names or ()), list(mesh.get_coordinate() or ())],
        "shape": list(dtensor.shape),
        "stride": list(dtensor.stride()),
    }


def address(parameter: Any) -> int:
    """Where a parameter's bytes are, or those of its first part."""
    if is_traceable_wrapper_subclass(parameter):
        names, _ = parameter.__tensor_flatten__()
        return int(getattr(parameter, names[0]).data_ptr())
    return int(parameter.data_ptr())


def together(
    how: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], old: Any, owner: nn.Module, *, grad: bool
) -> nn.Parameter:
    """The parameter of `owner` whose parts these are; `old`: what the skeleton has there. Raises StructureError."""
    if "placement" in how:
        return _dtensor(how["placement"], tensors["local"], old, grad=grad)
    kind: Any = values.type_of(how["type"])
    made: Any
    state: dict[str, Any] = values.decode(how["state"], tensors, owner)
    if "wrapper" in how:
        size, stride = how["wrapper"]
        inner = {part: tensors[part] for part in how["inner"]}
        made = kind.__tensor_unflatten__(inner, state, torch.Size(size), tuple(stride))
        return nn.Parameter(made, requires_grad=grad)
    made = torch.Tensor._make_subclass(kind, tensors[OWN], grad)
    made.__dict__.update(state)
    for attribute, key in how["also"].items():
        owner.__dict__[attribute] = state[key]
    return made  # type: ignore[no-any-return]


# --- taking apart -----------------------------------------------------------------------------------------------------


def _taken(name: str, parameter: Any, owner: nn.Module) -> Parts:
    kind = type(parameter)
    how: dict[str, Any] = {"type": values.reference(kind)}
    if is_traceable_wrapper_subclass(parameter):
        inner, context = parameter.__tensor_flatten__()
        tensors = {part: _plain(f"{name}:{part}", getattr(parameter, part)) for part in inner}
        state = values.encode(context, name, owner=owner)
        return Parts(tensors, how | {
            "wrapper": [list(parameter.shape), list(parameter.stride())], "inner": list(inner), "state": state,
        })  # fmt: skip
    own: dict[str, Any] = {OWN: parameter}
    how["state"] = values.encode(dict(vars(parameter)), name, owner=owner, tensors=own)
    for part, value in own.items():
        if part != OWN:
            _plain(f"{name}:{part}", value)
    objects = {id(v): k for k, v in vars(parameter).items() if not isinstance(v, (*PLAIN, torch.dtype, nn.Module))}
    how["also"] = {a: objects[id(v)] for a, v in vars(owner).items() if id(v) in objects}
    return Parts(own, how)


def _plain(name: str, value: Any) -> torch.Tensor:
    if type(value) not in (torch.Tensor, nn.Parameter):
        raise PublishError(f"{name} is a {type_name(type(value))}: parts of parts are not shared")
    return value  # type: ignore[no-any-return]


def _prove(name: str, parameter: torch.Tensor, owner: nn.Module, found: Parts) -> None:
    """Put it together and take it apart again: the same tensors and values, or it is refused."""
    before = dict(vars(owner))
    try:
        made: Any = together(found.how, found.tensors, parameter, owner, grad=parameter.requires_grad)
        again = _taken(name, made, owner)
    except (StructureError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise PublishError(f"{name} is a {type_name(type(parameter))}, which cannot be put together again: {e}") from e
    finally:
        owner.__dict__.update(before)
    pairs = [(found.tensors[p], again.tensors.get(p)) for p in found.tensors]
    same = found.how == again.how and all(_alike(a, b) for a, b in pairs)
    if not same or type(made) is not type(parameter) or made.dtype != parameter.dtype:
        raise PublishError(f"{name} is a {type_name(type(parameter))}, which does not come back as it was")


def _alike(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """The same elements of the same memory."""
    return b is not None and (a.data_ptr(), a.dtype, a.shape, a.stride()) == (
        b.data_ptr(),
        b.dtype,
        b.shape,
        b.stride(),
    )


# --- putting together -------------------------------------------------------------------------------------------------


def _dtensor(said: Mapping[str, Any], local: torch.Tensor, old: Any, *, grad: bool) -> nn.Parameter:
    if not is_dtensor(old) or placement(old) != said:
        raise StructureError(f"a shard has a tensor placed as {said}, the module has it otherwise")
    made = type(old).from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=tuple(old.stride())
    )
    return nn.Parameter(made, requires_grad=grad)
