# SPDX-License-Identifier: Apache-2.0
"""The progress of hashing a checkpoint: a bar on a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wcache.cli import render
from wcache.daemon.status import size
from wcache.weights.checkpoint import Survey

LINE_EVERY_S = 5.0


@contextmanager
def meter(survey: Survey) -> Iterator[Callable[[int, int], None]]:
    """Takes bytes hashed and bytes to hash; shows nothing if all is known already."""
    if not sys.stderr.isatty():
        yield _Lines(survey)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("hashing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=render.console(sys.stderr), transient=True) as bar:
        task = None

        def show(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("hashing", total=total)
            bar.update(task, completed=done)

        yield show


class _Lines:
    """What takes no time needs no line."""

    def __init__(self, survey: Survey) -> None:
        self._name = survey.directory.name
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said > LINE_EVERY_S:
            self._said = now
            render.say(f"hashing {self._name}: {100 * done // max(total, 1)} % of {size(total)}")
