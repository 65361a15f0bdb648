# SPDX-License-Identifier: Apache-2.0
"""Every MiB of a rank's GPU in `wcache status`: what NVML says is in use, split by what takes it.

The daemon knows its shards and engines but asks no GPU library; the CLI does, for all ranks at once, and leaves a
status as it is where NVML cannot be asked. Ranks that share a GPU share its account.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from wcache.errors import BackendError
from wcache.host.gpu_memory import account, measure
from wcache.model import BackendName, ShardState
from wcache.protocol.messages import RankStatus

Other = TypeVar("Other")


def with_memory(answers: Mapping[int, RankStatus | Other]) -> dict[int, RankStatus | Other]:
    """The answers with `memory` of cuda ranks filled in; see GpuAccount for the keys."""
    known = [a for a in answers.values() if isinstance(a, RankStatus) and a.backend is BackendName.CUDA and a.device]
    accounts = {device: _of_device(device, known) for device in {status.device for status in known}}

    def filled(answer: RankStatus | Other) -> RankStatus | Other:
        if isinstance(answer, RankStatus) and (found := accounts.get(answer.device)) is not None:
            return msgspec.structs.replace(answer, memory=found)
        return answer

    return {rank: filled(answer) for rank, answer in answers.items()}


def _of_device(device: str, statuses: list[RankStatus]) -> dict[str, int] | None:
    shards = [s for status in statuses if status.device == device for s in status.shards]
    weights = sum(s.segment_bytes for s in shards if s.state is ShardState.RESIDENT)
    engines = {lease.pid for shard in shards for lease in shard.leases if lease.pid is not None}
    try:
        return account(measure(device), weights, engines).as_dict()
    except BackendError:  # no NVML here: the daemon's own figure stands
        return None
