# SPDX-License-Identifier: Apache-2.0
"""The ranks of one model that is tensor parallel by Transformers' `tp_plan`; a group of one is any other engine."""

from __future__ import annotations

from typing import Any

from wcache.engine.group import Group
from wcache.errors import Miss
from wcache.model import MissReason

_groups: dict[int, Any] = {}


def group_of(model: Any, load_config: Any) -> Group:
    """The processes that load this model together. Raises Miss(unsupported) for meshes other than tensor parallel."""
    if getattr(load_config, "device_mesh", None) is None:
        return Group()
    config = getattr(model.config, "distributed_config", None)
    sizes = {name: getattr(config, f"{name}_size", 1) for name in ("pp", "fsdp", "ep")}  # not every version has all
    if set(sizes.values()) != {1} or getattr(config, "enable_expert_parallel", False):
        raise Miss(MissReason.UNSUPPORTED, f"only tensor parallel models are shared, this one is spread by {sizes}")
    from torch import distributed

    return Group(distributed.get_rank(), distributed.get_world_size(), _on_cpu(distributed))


def _on_cpu(distributed: Any) -> Any:
    """A process group of all ranks that takes tensors on the CPU; None: the default one does."""
    world = distributed.group.WORLD
    if distributed.get_backend(world) == "gloo":
        return None
    if id(world) not in _groups:
        _groups[id(world)] = distributed.new_group(backend="gloo")
    return _groups[id(world)]
