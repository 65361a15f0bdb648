# SPDX-License-Identifier: Apache-2.0
"""The workers of one vLLM engine, over vLLM's own CPU process group."""

from __future__ import annotations

from wcache.engine import group


class Group(group.Group):
    """All workers that load one model together."""

    @classmethod
    def world(cls) -> Group:
        """The engine's group; a group of one where vLLM has initialised none."""
        from vllm.distributed import get_world_group

        try:
            world = get_world_group()
        except AssertionError:
            return cls()
        return cls(world.rank_in_group, world.world_size, world.cpu_group)
