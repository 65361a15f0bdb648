# SPDX-License-Identifier: Apache-2.0
"""What a stop did to memory: freed, kept in an fd store, or still mapped by engines that go on serving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from wcache.cli.ranks import STOPPED, GroupReport, RankReport
from wcache.daemon.status import size
from wcache.host import units
from wcache.host.units import Unit
from wcache.protocol.messages import ShardInfo


def describe(before: GroupReport, after: Mapping[str, Unit]) -> Iterator[str]:
    """A line or two per rank, from what it held and what its unit keeps."""
    for rank in before.ranks:
        yield from _rank(rank, after.get(units.service(rank.rank)), before)


def _rank(rank: RankReport, unit: Unit | None, before: GroupReport) -> Iterator[str]:
    shards = rank.status.shards if rank.status is not None else ()
    held = sum(shard.segment_bytes for shard in shards)
    if unit is not None and unit.stored_fds > 0:
        flag = " --user" if before.manager == "user" else ""
        yield f"rank {rank.rank}: stopped; {size(held) if held else 'its memory'} stays in memory for the next start"
        yield f"        free it with: systemctl{flag} clean --what=fdstore {unit.name}"
        return
    if rank.status is None and rank.state != STOPPED:
        yield f"rank {rank.rank}: stopped; it was {rank.state}, so it is not known what it held and what is freed"
        return
    yield f"rank {rank.rank}: stopped; {freed(held, shards)}"
    yield from mapped_by(shards)


def freed(held: int, shards: Iterable[ShardInfo]) -> str:
    """How much of the bytes held is free now, and how much engines still map."""
    mapped = sum(shard.segment_bytes for shard in shards if shard.leases)
    return f"{size(max(0, held - mapped))} freed" + (f", {size(mapped)} still mapped" if mapped else "")


def mapped_by(shards: Iterable[ShardInfo]) -> Iterator[str]:
    """A line for each engine that still maps a shard."""
    for shard in shards:
        for lease in shard.leases:
            pid = "" if lease.pid is None else f" (pid {lease.pid})"
            yield f"        {lease.name}{pid} goes on serving from {size(shard.segment_bytes)}, freed when it ends"
