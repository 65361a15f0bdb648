# SPDX-License-Identifier: Apache-2.0
"""The loader child: started, watched, and ended; its words go to our log, its last ones into the error.

Runs in the preloading thread, which has to outlive the child (see `host/child.py`). The child publishes over the
rank's socket like any engine. A loader that makes no progress for twice `stall_s` is killed: systemd has stopped
waiting by then, and without systemd nobody else would.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wcache.daemon.rank import Rank
from wcache.host import child
from wcache.host.fds import OwnedFd
from wcache.host.flock import FileLock

log = logging.getLogger(__name__)

LAST_WORDS = 12  # lines
LOOK_EVERY_S = 0.25
END_TIMEOUT_S = 5.0
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


class Gone(Exception):
    """The load is no longer wanted: the daemon stops or drains."""


class Ending(NamedTuple):
    """`problem`: what went wrong, if anything. `status`: the exit status, negative for a signal."""

    problem: str
    status: int | None = None


def run(
    rank: Rank, command: Sequence[str], environment: Mapping[str, str], socket_dir: Path, unwanted: Callable[[], bool]
) -> Ending:
    """Run the loader to its end; `environment` is added to ours. Returns how it ended. Raises Gone."""
    with _slot(rank, socket_dir, unwanted):
        log.info("rank %d loading shard from disk", rank.who.rank)
        return _Loader(rank, command, environment).watch(unwanted)


class _Loader:
    def __init__(self, rank: Rank, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._rank = rank
        self._stall_s = 2 * rank.who.config.timeouts.stall_s
        self._words: deque[str] = deque(maxlen=LAST_WORDS)
        self._process = subprocess.Popen(
            child.command(command),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="wcache-loader-log", daemon=True)
        self._listener.start()

    def watch(self, unwanted: Callable[[], bool]) -> Ending:
        try:
            with OwnedFd(os.pidfd_open(self._process.pid)) as pidfd:
                problem = self._wait(pidfd, unwanted)
        finally:
            self._end()
        return Ending(problem or self._ending(), self._process.returncode)

    def _wait(self, pidfd: OwnedFd, unwanted: Callable[[], bool]) -> str:
        poll = select.poll()
        poll.register(pidfd.fileno(), select.POLLIN)
        moves, since = -1, time.monotonic()
        while not poll.poll(LOOK_EVERY_S * 1000):
            if unwanted():
                raise Gone
            now_moves, now = self._rank.read(lambda state: state.moves), time.monotonic()
            if now_moves != moves:
                moves, since = now_moves, now
            elif now - since > self._stall_s:
                return self._with_words(f"the loader made no progress for {self._stall_s:g} s")
        return ""

    def _end(self) -> None:
        """Kill what is left of the loader's process group; its leader is not reaped yet, so the group is still ours."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._listener.join(END_TIMEOUT_S)
        if self._process.stdout is not None and not self._listener.is_alive():
            self._process.stdout.close()

    def _ending(self) -> str:
        code = self._process.returncode
        if code == 0:
            return ""
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else "?"
            guess = "; the kernel may have been short of memory" if -code == signal.SIGKILL else ""
            return self._with_words(f"the loader was ended by signal {-code} ({name})", guess)
        return self._with_words(f"the loader ended with exit status {code}")

    def _with_words(self, end: str, guess: str = "") -> str:
        if not self._words:
            return f"{end} and said nothing{guess}"
        return "\n  ".join([f"{end}{guess}:", *self._words])

    def _listen(self) -> None:
        if self._process.stdout is None:
            return
        for raw in self._process.stdout:
            level, line = unstamped(raw.decode(errors="replace").rstrip())
            if line:
                self._words.append(line)
                log.log(level, "rank %d loader: %s", self._rank.who.rank, line)


def unstamped(line: str) -> tuple[int, str]:
    """Level and text of a line that our own logging wrote (`wcache.log`); any other line as it is."""
    stamp = _STAMP.match(line)
    if stamp is None:
        return logging.INFO, line
    return logging.getLevelNamesMapping()[stamp[1]], line[stamp.end() :]


@contextlib.contextmanager
def _slot(rank: Rank, directory: Path, unwanted: Callable[[], bool]) -> Iterator[None]:
    """One of the host's `load_slots`; whoever holds one makes progress or is killed, so waiting is progress too."""
    slots = rank.who.config.load_slots
    if slots <= 0:
        yield
        return
    while True:
        for number in range(slots):
            lock = FileLock.try_acquire(directory / f"load-slot-{number}.lock")
            if lock is not None:
                with lock:
                    yield
                return
        if unwanted():
            raise Gone
        with rank.state() as state:
            state.moved()
        rank.wait(rank.version(), LOOK_EVERY_S)
