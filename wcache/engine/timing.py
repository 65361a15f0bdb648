# SPDX-License-Identifier: Apache-2.0
"""Where the time of an attach went, phase by phase; the phases sum to the total because nothing lies between them."""

from __future__ import annotations

import time

TOTAL = "total"


class Stopwatch:
    """Every moment since it was made belongs to exactly one phase: the one named by the next `lap`."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.phases: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """What passed since the last lap was `phase`."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now

    def timing(self) -> dict[str, float]:
        """Seconds by phase in the order in which they came, and their sum as "total"."""
        return {**self.phases, TOTAL: sum(self.phases.values())}
