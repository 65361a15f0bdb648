# SPDX-License-Identifier: Apache-2.0
"""One rank: the pure state behind its one lock, the store beside it, and everybody who waits for a change.

Runs in the daemon; shared by all its threads. `with rank.state() as s:` is the only way to the state: on the way out
it is checked, effects are carried out (after the lock is let go) and waiters wake. Whoever finds the state broken
calls `broken`, which ends the daemon: systemd starts it again and the fd store still has the weights.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from wcache.daemon.facts import Drop, Effect, Forget, Free, Wait
from wcache.daemon.invariants import BrokenInvariant
from wcache.daemon.state import State
from wcache.daemon.status import Identity, document, size
from wcache.daemon.store import Store
from wcache.host.fds import OwnedFd
from wcache.log import EVICTED, fields
from wcache.protocol.messages import RankStatus

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Rank:
    """`on_broken(error)` is called once if the state contradicts itself."""

    def __init__(self, who: Identity, state: State, store: Store, on_broken: Callable[[Exception], None]) -> None:
        self.who = who
        self.store = store
        self.trouble = ""  # what is wrong with the daemon itself; one writer, the accepting thread
        self.changed = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._state = state
        self._condition = threading.Condition(threading.Lock())
        self._version = 0
        self._on_broken = on_broken
        self._drop: Callable[[int], None] = lambda _: None

    def on_drop(self, drop: Callable[[int], None]) -> None:
        """`drop(connection)` ends a connection whose lease was taken away."""
        self._drop = drop

    @contextmanager
    def state(self) -> Iterator[State]:
        """The state, for one event. Nothing slow may happen inside."""
        effects: list[Effect] = []
        try:
            with self._condition:
                try:
                    yield self._state
                finally:
                    effects = self._after()
        finally:
            self._carry_out(effects)

    def decide(self, event: Callable[[State], Answer]) -> tuple[Answer, int]:
        """Ask something that may have to wait. An answer `Wait` changes nothing and wakes nobody.

        Returns the answer and the count of changes at that moment, for `wait`.
        """
        effects: list[Effect] = []
        try:
            with self._condition:
                answer = event(self._state)
                if not isinstance(answer, Wait):
                    effects = self._after()
                return answer, self._version
        finally:
            self._carry_out(effects)

    def _after(self) -> list[Effect]:
        try:
            self._state.check()
        except BrokenInvariant as e:
            self._on_broken(e)
        self._version += 1
        self._condition.notify_all()
        os.eventfd_write(self.changed.fileno(), 1)
        return self._state.take_effects()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Free(shard_id, generation, freed, why):
                    self.store.free(generation)
                    log.info(
                        "rank %d evicted shard %s generation %d (%s): %s", self.who.rank, shard_id[:12], generation,
                        size(freed), why,
                        extra=fields(MESSAGE_ID=EVICTED, WCACHE_RANK=self.who.rank, WCACHE_FINGERPRINT=shard_id),
                    )  # fmt: skip
                case Forget(generation):
                    self.store.forget(generation)
                case Drop(connection):
                    self._drop(connection)

    def read(self, question: Callable[[State], Answer]) -> Answer:
        """Ask without changing anything; wakes nobody."""
        with self._condition:
            return question(self._state)

    def wake(self) -> None:
        """Let every waiter look again."""
        with self._condition:
            self._version += 1
            self._condition.notify_all()

    def version(self) -> int:
        with self._condition:
            return self._version

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait until something changed since `version`; False if nothing did within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            return self._condition.wait_for(lambda: self._version != version, max(0.0, deadline - time.monotonic()))

    def status(self) -> RankStatus:
        with self._condition:
            state, device, snapshot = self._state.rank_state, self._state.device, self._state.snapshot()
        return document(self.who, state, device, snapshot, trouble=self.trouble)
