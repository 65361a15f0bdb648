# SPDX-License-Identifier: Apache-2.0
"""From a manifest and its mapped tensors to a vLLM model that is ready to serve, without reading the checkpoint.

    skeleton -> bind -> vLLM's post-processing in pre-processed mode -> complete (restore, then check everything)

Runs in the engine. Parameters keep the class and the attributes that vLLM gave them and stand on the mapping; all else
is private memory of the engine, because an engine may write it. Whatever does not agree is a StructureError that
names every difference; no tensor is ever made up, and none stays on the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from wcache.engine import state
from wcache.engine.state import Spot
from wcache.engine.tensors import dtype_name
from wcache.engine.tensors import tensors_of as tensors_of
from wcache.engine.vllm import capture, census
from wcache.errors import Miss, StructureError, listed
from wcache.model import Difference, Kind, MissReason
from wcache.weights.fingerprint import ABSENT
from wcache.weights.manifest import Manifest, TensorSpec

log = logging.getLogger(__name__)


def bind(model: nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Give the parameters, buffers and bare tensors that the skeleton has their memory. Raises StructureError.

    Returns the others, which only post-processing makes: `complete` binds them, so that vLLM never writes into them.
    Helper objects that hold a parameter or buffer as well, such as a router with its layer's bias, get the new one.
    """
    _remove(model, manifest.extra.get("removed", ()))
    before = {name: tensor for name, _, tensor in capture.registered(model)}
    known = {id(tensor): name for name, tensor in before.items()}
    absent = _absent(manifest)
    hanging = [s for s in state.bare(model, census.holds, aliases=True) if s.path not in absent]
    aliases = [(spot, known[id(spot.tensor)]) for spot in hanging if id(spot.tensor) in known]
    specs = [spec for spec in manifest.tensors if spec.kind is not Kind.ATTRIBUTE]
    _bind(model, manifest, tensors, [spec for spec in specs if before.keys() & set(spec.names)])
    now = {name: tensor for name, _, tensor in capture.registered(model)}
    own = set(map(id, now.values()))
    _attributes(model, manifest, tensors, [spot for spot in hanging if id(spot.tensor) not in own])
    _follow(aliases, now)
    return [spec for spec in specs if not before.keys() & set(spec.names)]


def _remove(model: nn.Module, names: Iterable[str]) -> None:
    """Modules that are gone once the weights are loaded."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        prefix, _, leaf = name.rpartition(".")
        if prefix in modules:
            modules[prefix]._modules.pop(leaf, None)


def _follow(aliases: Iterable[tuple[Spot, str]], now: Mapping[str, torch.Tensor]) -> None:
    """Let these places hold what the model has under their names now."""
    for spot, name in aliases:
        if name in now and spot.tensor is not now[name]:
            spot.put(now[name])


def _bind(
    model: nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor], specs: Iterable[TensorSpec]
) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    problems: list[str] = []
    for spec in specs:
        parameter: nn.Parameter | None = None
        for name in spec.names:
            prefix, _, leaf = name.rpartition(".")
            module = modules.get(prefix)
            if module is None:
                problems.append(f"{name}: the model has no module {prefix}")
            elif spec.kind is Kind.PARAMETER:
                if parameter is None:
                    plain = manifest.attributes.get(f"{name}@{census.CLASS}") == census.PLAIN_PARAMETER
                    parameter = _parameter(module, leaf, tensors[name], plain=plain)
                module.__dict__.pop(leaf, None)
                module._buffers.pop(leaf, None)
                module._parameters[leaf] = parameter
            else:
                module.__dict__.pop(leaf, None)
                module._parameters.pop(leaf, None)
                buffer = _as(module._buffers.get(leaf), tensors[name])
                module.register_buffer(leaf, buffer, persistent=spec.kind is Kind.BUFFER)
    _refuse(problems)


def _parameter(module: nn.Module, leaf: str, tensor: torch.Tensor, *, plain: bool) -> nn.Parameter:
    """A parameter over `tensor`; unless it is to be plain, with the class and attributes of the one it replaces."""
    old = module._parameters.get(leaf)
    return nn.Parameter(tensor, requires_grad=False) if old is None or plain else _like(old, tensor)


def _like(old: nn.Parameter, tensor: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter.__class__ = old.__class__
    parameter.__dict__.update(old.__dict__)
    return parameter


def complete(
    model: nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor], late: Iterable[TensorSpec]
) -> None:
    """After post-processing: restore what it cannot know, then hold the result against the manifest.

    Raises StructureError.
    """
    _drop_consumed(model, set(manifest.extra.get("consumed", ())))
    _bind(model, manifest, tensors, late)
    spots = list(capture.bare(model))
    _attributes(model, manifest, tensors, spots)
    census.restore(model, manifest.attributes)
    left = {*(n for n, _, t in capture.registered(model) if t.is_meta), *(s.path for s in spots if s.now().is_meta)}
    _refuse(
        [
            *differences(model, manifest, tensors),
            *census.differences(model, manifest.attributes),
            *(f"{name}: left without memory" for name in sorted(left - _absent(manifest))),
        ]
    )


def _absent(manifest: Manifest) -> set[str]:
    """Tensors that have no memory where the weights were loaded either."""
    return set(manifest.extra.get("absent", ()))


def _drop_consumed(model: nn.Module, consumed: set[str]) -> None:
    """Placeholders that post-processing used up where the weights were loaded, and that hang about here."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, _, _ in list(capture.registered(model)):
        prefix, _, leaf = name.rpartition(".")
        if name in consumed and hasattr(modules[prefix], leaf):
            delattr(modules[prefix], leaf)


def _attributes(
    model: nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor], hanging: Iterable[Spot]
) -> None:
    """Bare tensors: put back what is missing, on meta, or not what was captured. Raises StructureError."""
    spots = {spot.path: spot for spot in hanging}
    for spec in manifest.tensors:
        if spec.kind is not Kind.ATTRIBUTE:
            continue
        for path in spec.names:
            captured, spot = tensors[path], spots.get(path)
            if spot is None:
                _put_new(model, path, captured)
                continue
            if spot.tensor.is_meta and (spot.tensor.shape, spot.tensor.dtype) != (captured.shape, captured.dtype):
                _refuse([f"{path}: {tuple(captured.shape)} in the shard, {tuple(spot.tensor.shape)} here"])
            if not _equal(spot.tensor, captured):
                spot.put(_as(spot.tensor, captured))


def _as(old: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with what vLLM noted on the one that it replaces."""
    if isinstance(old, nn.Parameter):
        return _like(old, tensor)
    tensor.__dict__.update(getattr(old, "__dict__", {}))
    return tensor


def _put_new(model: nn.Module, path: str, tensor: torch.Tensor) -> None:
    prefix, _, leaf = path.rpartition(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    if prefix in modules:
        modules[prefix]._parameters.pop(leaf, None)
        modules[prefix]._buffers.pop(leaf, None)
        setattr(modules[prefix], leaf, tensor)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte by byte, so that NaN equals itself."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def differences(model: nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """One sentence for each parameter or buffer that is not what the manifest says, or not where it was bound."""
    specs = {name: spec for spec in manifest.tensors if spec.kind is not Kind.ATTRIBUTE for name in spec.names}
    have = {name: (kind, tensor) for name, kind, tensor in capture.registered(model)}
    found = [f"{name}: not in the model" for name in specs.keys() - have.keys()]
    absent = {name for name in _absent(manifest) & have.keys() if have[name][1].is_meta}
    found += [f"{name}: not in the shard" for name in have.keys() - specs.keys() - absent]
    for name in specs.keys() & have.keys():
        found += _difference(name, specs[name], *have[name], tensors[name])
    return sorted(found)


def _difference(name: str, spec: TensorSpec, kind: Kind, tensor: torch.Tensor, bound: torch.Tensor) -> list[str]:
    shard = (str(spec.kind), spec.dtype, spec.shape, spec.stride)
    model = (str(kind), dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))
    if model != shard:
        return [f"{name}: {model} in the model, {shard} in the shard"]
    if kind is Kind.PARAMETER and tensor.data_ptr() != bound.data_ptr():
        return [f"{name}: post-processing replaced it, so it would have been processed twice"]
    return []


def check(model: nn.Module, manifest: Manifest) -> None:
    """Before anything is bound: does the shard belong to this skeleton? Raises StructureError, Miss.

    Shapes and dtypes must be those that the publisher's model had before its weights were loaded: bare tensors are
    often as large as the engine wants them.
    """
    _same_methods(capture.methods(model), manifest.extra.get("methods", {}))
    unpublished = {*manifest.extra.get("consumed", ()), *_absent(manifest)}
    bound = (spec for spec in manifest.tensors if spec.kind is not Kind.ATTRIBUTE)
    there = {name: (spec.shape, spec.dtype) for spec in bound for name in spec.names} | _shapes(manifest, "bare")
    there |= _shapes(manifest, "reshaped")
    bare = [(spot.path, capture.shape_of(spot.tensor)) for spot in capture.bare(model)]
    registered = [(name, capture.shape_of(tensor)) for name, _, tensor in capture.registered(model)]
    problems = [f"{name}: not in the shard" for name, _ in registered if name not in there.keys() | unpublished]
    for name, here in (*registered, *bare):
        if there.get(name, here) != here:
            problems.append(f"{name}: {_shape(there[name])} where it was loaded, {_shape(here)} here")
    _refuse(problems)


def _shapes(manifest: Manifest, which: str) -> dict[str, capture.Shape]:
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in manifest.extra.get(which, {}).items()}


def _shape(shape: capture.Shape) -> str:
    return f"{shape[1]} {shape[0]}"


def _same_methods(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    found = [
        Difference(f"layout.kernel_backends.{name}", here.get(name, ABSENT), there.get(name, ABSENT))
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if found:
        raise Miss(MissReason.LAYOUT, f"vLLM chose other kernels here: {found[0]}", found)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise StructureError(f"model and shard do not agree: {listed(problems)}", problems)
