# SPDX-License-Identifier: Apache-2.0
"""Are the resident bytes those that were committed? A checker child recomputes the digests, the daemon compares.

Runs in the thread of whoever asks (a session's `verify`, the start, the background check of restored host segments),
one check at a time. A digest that differs, and segments that cannot be mapped (a GPU was reset), condemn the shard;
a checker that crashes, hangs or has no GPU library condemns nothing but says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial

from wcache.daemon.store import Holding
from wcache.errors import ConnectionClosed, DeadlineExceeded, SegmentError, WcacheError
from wcache.host import child
from wcache.host.fds import MAX_FDS_PER_RECORD, receive, send
from wcache.model import BackendName
from wcache.protocol.checks import CheckFailed, CheckRequest, Segments, decode_from_checker, encode
from wcache.weights.manifest import Manifest

STALL_S = 120.0  # without a segment's answer for this long, a checker counts as hung
TICK_S = 1.0
BACKGROUND_NICE = 19

Waiting = Callable[[str], None]  # called at least every TICK_S; what it raises ends the check

_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problem` empty: the bytes are those that were committed. `condemned`: it is proven that they are not."""

    problem: str
    condemned: bool
    bytes_checked: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problem


def check(holding: Holding, manifest: Manifest, waiting: Waiting, *, background: bool = False) -> Verdict:
    """Recompute a shard's digests. Raises only what `waiting` raises."""
    with _turn(waiting):
        start = time.monotonic()
        checked = 0
        try:
            with contextlib.closing(_digests(holding, manifest, waiting, background)) as digests:
                for index, digest in digests:
                    wanted = manifest.segments[index]
                    checked += wanted.size
                    if digest != wanted.digest:
                        problem = f"segment {index}: its digest is {digest}, {wanted.digest} was committed"
                        return Verdict(problem, True, checked, time.monotonic() - start)
        except _Failed as e:
            return Verdict(str(e), e.condemned, checked, time.monotonic() - start)
        return Verdict("", False, checked, time.monotonic() - start)


class _Failed(Exception):
    def __init__(self, message: str, *, condemned: bool = False) -> None:
        super().__init__(message)
        self.condemned = condemned


@contextlib.contextmanager
def _turn(waiting: Waiting) -> Iterator[None]:
    while not _one_at_a_time.acquire(timeout=TICK_S):
        waiting("another check is running")
    try:
        yield
    finally:
        _one_at_a_time.release()


def _digests(
    holding: Holding, manifest: Manifest, waiting: Waiting, background: bool
) -> Generator[tuple[int, str], None, None]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = _spawn(theirs)
        try:
            ours.settimeout(STALL_S)
            _ask(ours, holding, manifest, background)
            total = len(manifest.segments)
            for done in range(total):
                yield _answer(ours, partial(waiting, f"checked {done} of {total} segments"))
        except ConnectionClosed as e:
            raise _Failed(f"the checker ended early: {_ending(process)}") from e
        except WcacheError as e:
            raise _Failed(f"the checker failed: {e}") from e
        finally:
            process.kill()
            process.wait()


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "wcache.engine.checker", str(theirs.fileno())]
    return subprocess.Popen(
        child.command(command),
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ask(sock: socket.socket, holding: Holding, manifest: Manifest, background: bool) -> None:
    cores = len(os.sched_getaffinity(0))
    request = CheckRequest(
        backend=manifest.backend,
        device=manifest.device,
        sizes=tuple(s.size for s in manifest.segments),
        threads=cores if manifest.backend is BackendName.HOST and not background else 1,
        nice=BACKGROUND_NICE if background else 0,
    )
    send(sock, encode(request))
    for first in range(0, len(holding.segments), MAX_FDS_PER_RECORD):
        send(sock, encode(Segments(first=first)), holding.segments[first : first + MAX_FDS_PER_RECORD])


def _answer(sock: socket.socket, tick: Callable[[], None]) -> tuple[int, str]:
    deadline = time.monotonic() + STALL_S
    sock.settimeout(TICK_S)
    while True:
        try:
            record, _ = receive(sock)
            break
        except DeadlineExceeded:
            tick()
            if time.monotonic() > deadline:
                raise _Failed(f"the checker said nothing for {STALL_S:.0f} s") from None
    answer = decode_from_checker(record)
    if isinstance(answer, CheckFailed):
        raise _Failed(answer.message, condemned=answer.code == SegmentError.code)
    return answer.index, answer.digest


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=TICK_S)
    except subprocess.TimeoutExpired:
        return "its end of the socket is closed"
    return f"exit status {code}" if code >= 0 else f"signal {-code}"
