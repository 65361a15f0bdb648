# SPDX-License-Identifier: Apache-2.0
"""Watching ranks while the service manager works: live bars on a terminal, a line per change elsewhere (stderr)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wcache.cli import render
from wcache.cli.context import Context
from wcache.cli.ranks import UNRESPONSIVE, GroupReport, RankReport, last_words, look, look_at_units
from wcache.errors import SystemdError

if TYPE_CHECKING:
    from rich.table import Table

POLL_S = 0.25
FAILURE_POLL_S = 0.15
LINE_EVERY_S = 5.0  # a load's numbers change all the time; a log wants them now and then
BAR_WIDTH = 24


def watch(
    context: Context,
    ranks: tuple[int, ...],
    over: Callable[[GroupReport | None], bool],
    *,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Look until `over` says so (None: no look succeeded). `pause` waits between looks and may return early."""
    with _shown() as show:
        while True:
            report = _look(context, ranks)
            if report is not None:
                show(report)
            if over(report):
                return
            pause(POLL_S)


def _look(context: Context, ranks: tuple[int, ...]) -> GroupReport | None:
    try:
        return look(context, ranks)
    except SystemdError:  # a manager too busy to answer is no reason to give up a job that it works on
        return None


@contextmanager
def failures(context: Context, ranks: tuple[int, ...]) -> Iterator[dict[int, str]]:
    """How each rank last failed while the block runs.

    A thread of its own: between a failure and the next start lie RestartSec=, a fifth of a second, and a rank that is
    just dying can hold up a look for longer; afterwards the manager remembers nothing of it. The last look is after
    the block, for the failure that ended it.
    """
    noted: dict[int, str] = {}
    stop = threading.Event()

    def note() -> None:
        over = False
        while not over:
            over = stop.wait(FAILURE_POLL_S)
            try:
                seen = look_at_units(context, ranks)
            except SystemdError:  # the manager is busy; the job itself will say if something is wrong with it
                continue
            for unit in seen.values():
                if unit.rank is not None and (unit.restarting or unit.active == "failed"):
                    noted[unit.rank] = last_words(unit)

    thread = threading.Thread(target=note, name="failures")
    thread.start()
    try:
        yield noted
    finally:
        stop.set()
        thread.join()


@contextmanager
def _shown() -> Iterator[Callable[[GroupReport], None]]:
    if not sys.stderr.isatty():
        yield _Teller().tell
        return
    from rich.live import Live

    with Live(console=render.console(sys.stderr), auto_refresh=False, transient=True) as live:
        yield lambda report: live.update(bars(report), refresh=True)


def bars(report: GroupReport) -> Table:
    """A row a rank: state, bar, numbers."""
    from rich.markup import escape
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for rank in report.ranks:
        progress = rank.status.progress if rank.status is not None else None
        total, done = (progress.bytes_total, progress.bytes_done) if progress is not None else (0, 0)
        if rank.ready:
            total = done = 1
        bar = ProgressBar(total=total or None, completed=done, width=BAR_WIDTH) if rank.ready or total else ""
        table.add_row(f"rank {rank.rank}", rank.state, bar, escape(_text(rank)))
    return table


def _text(rank: RankReport) -> str:
    """What the rank says, without repeating its state."""
    said = rank.status.text if rank.status is not None else ""
    text = rank.problem or said
    return text.removeprefix(rank.state).lstrip(" :,")


class _Teller:
    """Says a rank's state when it changes, and its numbers every few seconds."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[str, float]] = {}
        self._silent: set[int] = set()

    def tell(self, report: GroupReport) -> None:
        silent = {rank.rank for rank in report.ranks if rank.state == UNRESPONSIVE}
        for rank in report.ranks:
            if rank.rank not in silent - self._silent:  # once is what a daemon does that is just being replaced
                self._tell(rank)
        self._silent = silent

    def _tell(self, rank: RankReport) -> None:
        now = time.monotonic()
        state, when = self._said.get(rank.rank, ("", 0.0))
        text = _text(rank)
        if rank.state != state or (not rank.ready and text and now - when > LINE_EVERY_S):
            self._said[rank.rank] = (rank.state, now)
            render.say(f"rank {rank.rank}: {rank.state}" + (f": {text}" if text else ""))
