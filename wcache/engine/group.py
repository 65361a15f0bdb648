# SPDX-License-Identifier: Apache-2.0
"""What the processes of one engine tell each other, so that all of them attach the same version or none does.

Runs in engines of several processes (vLLM's workers, Transformers' tensor parallel ranks), over a process group of
theirs on the CPU: small integers only, gathered by every rank at the same points. Rank 0 leads: it alone ever waits for
another engine, so that two engines which start together cannot wait for each other crosswise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wcache.model import MissReason

_REASONS = tuple(MissReason)


class Group:
    """All processes that load one model together; `rank` 0 leads."""

    def __init__(self, rank: int = 0, size: int = 1, process_group: Any = None) -> None:
        self.rank, self.size, self._process_group = rank, size, process_group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values (as many on each), in the order of ranks."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(theirs, mine, group=self._process_group)
        return [t.tolist() for t in theirs]


def words(content: str | None) -> list[int]:
    """A hex SHA-256 as four signed 64-bit integers."""
    data = bytes.fromhex(content) if content else bytes(32)
    return [int.from_bytes(data[i : i + 8], "big", signed=True) for i in range(0, 32, 8)]


def reason_number(reason: MissReason) -> int:
    return _REASONS.index(reason)


def reason_of(number: int) -> MissReason:
    return _REASONS[number]
