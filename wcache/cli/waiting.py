# SPDX-License-Identifier: Apache-2.0
"""Watching ranks while the service manager works: live bars on a terminal, a line per change elsewhere (stderr)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from wcache.cli import render
from wcache.cli.context import Context
from wcache.cli.ranks import GroupReport, RankReport, look

if TYPE_CHECKING:
    from rich.table import Table

POLL_S = 0.25
LINE_EVERY_S = 5.0  # a load's numbers change all the time; a log wants them now and then
BAR_WIDTH = 24


def watch(
    context: Context,
    ranks: tuple[int, ...],
    over: Callable[[GroupReport], bool],
    *,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Look until `over` says so; `pause` waits between looks and may return early."""
    if sys.stderr.isatty():
        _live(context, ranks, over, pause)
        return
    teller = _Teller()
    while True:
        report = look(context, ranks)
        teller.tell(report)
        if over(report):
            return
        pause(POLL_S)


def _live(
    context: Context, ranks: tuple[int, ...], over: Callable[[GroupReport], bool], pause: Callable[[float], object]
) -> None:
    from rich.live import Live

    with Live(console=render.console(sys.stderr), auto_refresh=False, transient=True) as live:
        while True:
            report = look(context, ranks)
            live.update(bars(report), refresh=True)
            if over(report):
                return
            pause(POLL_S)


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
    said = rank.status.text if rank.status is not None else ""
    return rank.problem or said


class _Teller:
    """Says a rank's state when it changes, and its numbers every few seconds."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[str, float]] = {}

    def tell(self, report: GroupReport) -> None:
        now = time.monotonic()
        for rank in report.ranks:
            state, when = self._said.get(rank.rank, ("", 0.0))
            if rank.state != state or (not rank.ready and _text(rank) and now - when > LINE_EVERY_S):
                self._said[rank.rank] = (rank.state, now)
                text = _text(rank)
                starts = text.startswith(rank.state)
                render.say(f"rank {rank.rank}: " + (text if starts else f"{rank.state}{': ' if text else ''}{text}"))
