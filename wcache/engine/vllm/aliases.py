# SPDX-License-Identifier: Apache-2.0
"""Helper objects that hold a parameter or buffer of the model as well, such as a router with its layer's bias.

Runs in the engine that attaches. Binding gives the model new parameters; these places have to follow, or they would
keep the skeleton's, which have no memory.
"""

from __future__ import annotations

from torch import nn

from wcache.engine import state
from wcache.engine.state import Spot
from wcache.engine.vllm.census import holds

Aliases = list[tuple[Spot, str]]


def of(model: nn.Module) -> Aliases:
    """Each place outside parameters and buffers that holds one of them, and the name it has there."""
    names = {id(tensor): name for name, _, tensor in state.registered(model)}
    spots = state.bare(model, holds, aliases=True)
    return [(spot, names[id(spot.tensor)]) for spot in spots if id(spot.tensor) in names]


def follow(model: nn.Module, found: Aliases) -> None:
    """Let these places hold what the model has under their names now."""
    now = {name: tensor for name, _, tensor in state.registered(model)}
    for spot, name in found:
        if name not in now or spot.tensor is now[name]:
            continue
        if isinstance(spot.owner, nn.Module):
            spot.owner.__dict__[spot.key] = now[name]  # an assignment would make it a parameter there, too
        else:
            spot.put(now[name])
