# SPDX-License-Identifier: Apache-2.0
"""What a stop did to memory: freed, kept in an fd store, or still mapped by engines that go on serving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wcache.cli.ranks import GroupReport, RankReport
from wcache.daemon.status import size
from wcache.host import units
from wcache.host.units import Unit


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
    leases = [(shard, lease) for shard in shards for lease in shard.leases]
    mapped = sum(shard.segment_bytes for shard in shards if shard.leases)
    yield f"rank {rank.rank}: stopped; {size(held - mapped)} freed" + (
        f", {size(mapped)} still mapped" if mapped else ""
    )
    for shard, lease in leases:
        pid = "" if lease.pid is None else f" (pid {lease.pid})"
        yield f"        {lease.name}{pid} goes on serving from {size(shard.segment_bytes)}, freed when it ends"
