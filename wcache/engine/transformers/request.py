# SPDX-License-Identifier: Apache-2.0
"""What a Transformers engine asks its rank for: the identity of the files that Transformers would read, and the layout.

Runs in engines and in the preload, when the skeleton stands and before any weight is read. `check_unchanged` must hold
again after the load: only then are the bytes in memory those that were identified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wcache.engine import together
from wcache.engine.group import Group
from wcache.engine.options import host_store
from wcache.engine.snapshot import Skeleton
from wcache.engine.tensors import gpu_uuid
from wcache.engine.transformers.layout import layout_key
from wcache.errors import CheckpointError, Miss
from wcache.model import CPU, IdentityPolicy, MissReason
from wcache.protocol.messages import Query
from wcache.weights.checkpoint import Survey, survey
from wcache.weights.identity import recognise, stamps_id


@dataclass(frozen=True, slots=True)
class Request(together.Request):
    """One rank's question."""

    def surveyed_again(self) -> Survey:
        return _survey([str(f.path) for f in self.survey.files])


def prepare(
    model: Any,
    files: list[str] | None,
    load_config: Any,
    before: Skeleton,
    arguments: Mapping[str, Any],
    policy: IdentityPolicy,
    group: Group,
) -> Request:
    """Raises Miss(unsupported) for what is not shared, CheckpointError, FingerprintError. Reads no weights."""
    device = _device(load_config.device_map)
    found = _survey(files)
    layout = layout_key(model, load_config, before, arguments, device, group)
    with host_store() as store:
        content = recognise(found, store, policy).content
    query = Query(
        layout=layout,
        model=str(load_config.pretrained_model_name_or_path),
        content=content,
        source=stamps_id(found),
        policy=policy,
    )
    return Request(query, found, CPU if device.type == CPU else gpu_uuid(device.index or 0))


def _survey(files: list[str] | None) -> Survey:
    """The directory of the files that Transformers resolved, with these files alone: a variant or another engine's
    format may lie beside them. Raises Miss if they are not among those that an identity covers."""
    if not files or not all(f.endswith(".safetensors") for f in files):
        raise Miss(MissReason.UNSUPPORTED, "only safetensors checkpoints have an identity")
    try:
        found = survey(Path(files[0]).parent)
    except CheckpointError as e:
        raise Miss(MissReason.UNSUPPORTED, f"the checkpoint has no identity: {e}", hint=e.hint) from e
    wanted = {Path(f).resolve() for f in files}
    read = tuple(f for f in found.files if f.path.resolve() in wanted)
    if {f.path.resolve() for f in read} != wanted:
        raise Miss(
            MissReason.UNSUPPORTED, f"{found.directory}: Transformers reads other files than the identity covers"
        )
    return replace(found, files=read)


def _device(device_map: Mapping[str, Any] | None) -> torch.device:
    places = {str(place) for place in (device_map or {"": CPU}).values()}
    if len(places) != 1:
        raise Miss(MissReason.UNSUPPORTED, f"device_map spreads the model over {', '.join(sorted(places))}")
    place = places.pop()
    device = torch.device("cuda", int(place)) if place.isdecimal() else _torch_device(place)
    if device.type not in (CPU, "cuda"):
        raise Miss(MissReason.UNSUPPORTED, f"weights on {place} are not shared")
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _torch_device(place: str) -> torch.device:
    try:
        return torch.device(place)
    except RuntimeError as e:  # "disk"
        raise Miss(MissReason.UNSUPPORTED, f"weights on {place} are not shared") from e
