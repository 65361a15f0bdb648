# SPDX-License-Identifier: Apache-2.0
"""What the daemon tells systemd and when: READY=1 once, STATUS= as it changes, extensions while bytes move, WATCHDOG=1.

READY=1 is also what a rank says that is drained before its weights were there: its start is over, nothing will come.
Runs in the main thread, which takes the state lock for it: a daemon whose lock is stuck goes silent and is restarted.
An extension is never a matter of time alone, it follows progress; a load that stalls runs into the start timeout.
"""

from __future__ import annotations

import time

from wcache.daemon.rank import Rank
from wcache.daemon.status import text
from wcache.host.systemd import Notifier
from wcache.model import RankState

EXTEND_EVERY_S = 5.0
STATUS_EVERY_S = 0.5
BUSY_PAUSE_S = 1.0
IDLE_PAUSE_S = 30.0


class Reporter:
    """`report` is called after every change and when the pause it asked for is over."""

    def __init__(self, rank: Rank, notifier: Notifier, watchdog_s: float | None) -> None:
        self._rank = rank
        self._notifier = notifier
        self._watchdog_s = watchdog_s
        self._stall_s = rank.who.config.timeouts.stall_s
        self._extend_every_s = min(EXTEND_EVERY_S, self._stall_s / 4)
        self._ready = False
        self._loaded = self._edge = False
        self._text = ""
        self._moves = 0
        self._told = self._extended = self._alive = float("-inf")

    def report(self) -> float:
        """Say what is due. Returns seconds until something else may be, if nothing changes before."""
        state, snapshot, moves, busy, settled = self._rank.read(
            lambda s: (s.rank_state, s.snapshot(), s.moves, s.busy, s.settled)
        )
        now = time.monotonic()
        line = "; ".join(part for part in (text(state, snapshot), self._rank.trouble) if part)
        if state is RankState.READY and not self._loaded:
            self._loaded = self._edge = True
        if settled and not self._ready:
            self._ready = True
            self._notifier.ready(line)
            self._text, self._told = line, now
        if line != self._text and now - self._told >= STATUS_EVERY_S:
            self._notifier.status(line)
            self._text, self._told = line, now
        if not self._ready and moves != self._moves and now - self._extended >= self._extend_every_s:
            self._notifier.extend(self._stall_s)
            self._moves, self._extended = moves, now
        return min(self._pulse(now), STATUS_EVERY_S if line != self._text else BUSY_PAUSE_S if busy else IDLE_PAUSE_S)

    def _pulse(self, now: float) -> float:
        """WATCHDOG=1 when it is due. Returns seconds until it is again."""
        if self._watchdog_s is None:
            return IDLE_PAUSE_S
        if now - self._alive >= self._watchdog_s:
            self._notifier.watchdog()
            self._alive = now
        return self._alive + self._watchdog_s - now

    def take_ready(self) -> bool:
        """True once, when the rank has become ready."""
        edge, self._edge = self._edge, False
        return edge
