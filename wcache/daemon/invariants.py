# SPDX-License-Identifier: Apache-2.0
"""What is true of a rank's state after every event, whatever the events were. Pure; part of `state.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wcache.daemon import matching
from wcache.daemon.facts import Publication, Shard


class BrokenInvariant(Exception):
    """The state contradicts itself: a defect. The daemon ends; the fd store keeps the weights."""


def check(
    shards: Mapping[int, Shard], publications: Sequence[Publication], current: int | None, next_generation: int
) -> None:
    """Raises BrokenInvariant naming what does not hold."""
    for generation, shard in shards.items():
        if shard.generation != generation or generation >= next_generation:
            raise BrokenInvariant(f"generation {shard.generation} is kept as {generation}; next is {next_generation}")
        if shard.leases and not shard.held:
            raise BrokenInvariant(f"a lease on generation {generation}, which was freed")
        if shard.superseded and not shard.leases:
            raise BrokenInvariant(f"generation {generation} is superseded, unused, and still here")
    if current is not None and current not in shards:
        raise BrokenInvariant(f"the configured shard, generation {current}, is not here")
    for i, one in enumerate(publications):
        if any(matching.means(one, other.query) for other in publications[i + 1 :]):
            raise BrokenInvariant(f"two writers for what {one.client.name} publishes")
