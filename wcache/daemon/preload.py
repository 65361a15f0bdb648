# SPDX-License-Identifier: Apache-2.0
"""Where the rank stands with the weights its configuration names: facts only, part of `state.py`.

`order` says that a load is wanted, `started` and `failed` what became of the loader child, `settle` that a resident
shard is what was wanted, `release` that somebody with the right to do so gave the weights up.
"""

from __future__ import annotations

from dataclasses import dataclass

from wcache.protocol.messages import ProgressInfo


@dataclass(slots=True)
class Preload:
    """`wanted`: a model is configured. `current`: generation of the shard that is it. `declared`: its loader has begun
    to publish. `reloading`: what is resident does not count, it is to be read anew."""

    wanted: bool
    current: int | None = None
    ordered: bool = False
    loading: bool = False
    declared: bool = False
    progress: ProgressInfo | None = None  # before its loader begins to publish
    reloading: bool = False
    released: bool = False
    failed: bool = False
    problem: str = ""
    note: str = ""
    reason: str = ""  # what the loader itself said about giving up

    def __post_init__(self) -> None:
        self.ordered = self.wanted

    @property
    def satisfied(self) -> bool:
        return not self.wanted or self.current is not None or self.released

    @property
    def busy(self) -> bool:
        """True while a load is on its way; its loader may still be ending when its shard is already here."""
        return self.ordered or (self.loading and (self.reloading or self.current is None))

    @property
    def undeclared(self) -> bool:
        """True while a load is wanted or under way and has not said yet what it will publish."""
        return (self.ordered or self.loading) and not self.declared and self.current is None and not self.failed

    def order(self, *, reloading: bool) -> None:
        self.ordered, self.reloading = True, reloading
        self.released = self.failed = False
        self.problem = self.note = ""

    def started(self) -> None:
        self.ordered, self.loading, self.failed = False, True, False
        self.reason = ""

    def declare(self) -> None:
        """The loader said what it loads: from now on progress is its publication's."""
        self.declared, self.progress = True, None

    def ended(self) -> None:
        """The loader child is gone, whatever it did."""
        self.progress = None
        self.loading, self.reloading = False, self.reloading and self.ordered

    def fail(self, problem: str) -> None:
        self.ended()
        self.problem = problem
        self.failed = self.current is None

    def settle(self, generation: int, problem: str) -> None:
        self.current = generation
        self.ordered = self.released = self.failed = self.reloading = False
        self.problem, self.note = problem, ""

    def release(self, note: str) -> None:
        """The weights went, and are not missed."""
        self.current, self.ordered, self.released = None, False, self.wanted
        self.note = note
