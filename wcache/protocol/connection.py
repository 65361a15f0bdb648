# SPDX-License-Identifier: Apache-2.0
"""The client's end of a connection to a rank: connect, say hello, ask, receive descriptors, all with deadlines.

Blocking SEQPACKET socket; used by engines, the loader child and the CLI. Not thread-safe: one owner asks one thing at
a time. Surprising: a full accept queue answers EAGAIN at once even with a timeout set, and a daemon that is being
killed may accept and vanish; both mean "ask again", so `connect` does until its deadline.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from wcache import __version__
from wcache.errors import ConnectionClosed, DeadlineExceeded, Denied, ProtocolError, Unavailable
from wcache.host.fds import OwnedFd, close_all, owning, receive, send
from wcache.protocol.messages import (
    PROTOCOL_VERSION,
    Failure,
    Hello,
    Hit,
    Message,
    Pending,
    SegmentFds,
    ToClient,
    Welcome,
    decode_reply,
    encode,
)

MAX_PATH_BYTES = 107  # sun_path of sockaddr_un, unix(7)
REPLY_TIMEOUT_S = 30.0  # the daemon sends Pending more often than this while it works on a request
_RETRY_S = 0.05

Reply = TypeVar("Reply", bound=Message)


def socket_path(socket_dir: Path, rank: int) -> Path:
    """Where rank `rank` listens. Raises Unavailable for a path that no socket can have."""
    path = socket_dir / f"rank-{rank}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise Unavailable(f"socket path {path} is longer than {MAX_PATH_BYTES} bytes", hint="use a shorter socket_dir")
    return path


class Connection:
    """A connection that has been welcomed; `welcome` says by whom. Closing it ends every lease it holds."""

    def __init__(
        self, sock: socket.socket, welcome: Welcome, path: Path, *, reply_timeout_s: float = REPLY_TIMEOUT_S
    ) -> None:
        self._sock = sock
        self._reply_timeout_s = reply_timeout_s
        self.welcome = welcome
        self.path = path
        _connections.add(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, fds: list[OwnedFd] | None = None) -> None:
        """Send without waiting for an answer; the descriptors stay the caller's."""
        self._sock.settimeout(self._reply_timeout_s)
        send(self._sock, encode(message), fds or [])

    def ask(
        self,
        message: Message,
        expect: type[Reply],
        fds: list[OwnedFd] | None = None,
        *,
        on_pending: Callable[[Pending], None] | None = None,
    ) -> Reply:
        """Send and wait for the answer; `Pending` resets the wait. Raises the error that a Failure carries."""
        reply, came = self._ask(message, fds, on_pending)
        if came or not isinstance(reply, expect):
            close_all(came)
            raise ProtocolError(f"{type(message).__name__} was answered by {type(reply).__name__}")
        return reply

    def attach(
        self, message: Message, *, on_pending: Callable[[Pending], None] | None = None
    ) -> tuple[Hit, OwnedFd, list[OwnedFd]]:
        """Send an Attach; returns the hit, the manifest memfd and the segment fds, all the caller's. Raises Miss."""
        reply, fds = self._ask(message, None, on_pending)
        with owning(fds):
            if not isinstance(reply, Hit) or len(fds) != 1:
                raise ProtocolError(f"Attach was answered by {type(reply).__name__} with {len(fds)} descriptors")
            while len(fds) - 1 < reply.segments:
                part, more = self._receive()
                fds.extend(more)
                if not isinstance(part, SegmentFds) or not more or part.first != len(fds) - 1 - len(more):
                    raise ProtocolError(f"segment descriptors broke off after {len(fds) - 1} of {reply.segments}")
        return reply, fds[0], fds[1:]

    def _ask(
        self, message: Message, fds: list[OwnedFd] | None, on_pending: Callable[[Pending], None] | None
    ) -> tuple[ToClient, list[OwnedFd]]:
        self.send(message, fds)
        while True:
            reply, came = self._receive()
            if isinstance(reply, Pending):
                close_all(came)
                if on_pending is not None:
                    on_pending(reply)
                continue
            if isinstance(reply, Failure):
                close_all(came)
                raise reply.error()
            return reply, came

    def _receive(self) -> tuple[ToClient, list[OwnedFd]]:
        self._sock.settimeout(self._reply_timeout_s)
        record, fds = receive(self._sock)
        with owning(fds):
            return decode_reply(record), fds

    def ended(self) -> bool:
        """True when the daemon closed its end; nothing is due here, so anything said unasked counts as the end too."""
        self._sock.setblocking(False)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A child closes its copies without a word: as long as one is open anywhere, the daemon counts on its owner."""
    for connection in list(_connections):
        connection.close()
    _connections.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def connect(
    path: Path,
    *,
    role: str,
    name: str,
    device: str | None = None,
    timeout_s: float = 5.0,
    reply_timeout_s: float = REPLY_TIMEOUT_S,
) -> Connection:
    """Connect and say hello. Raises Unavailable, Denied, ProtocolError; every wait ends within `timeout_s`.

    `reply_timeout_s`: how long each later answer may take; the default suits requests the daemon works on.
    """
    deadline = time.monotonic() + timeout_s
    hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=name, version=__version__, device=device)
    while True:
        sock = _connect(path, deadline)
        try:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            send(sock, encode(hello))
            record, fds = receive(sock)
            close_all(fds)
            reply = decode_reply(record)
            if isinstance(reply, Failure):
                raise reply.error()
            if not isinstance(reply, Welcome):
                raise ProtocolError(f"Hello was answered by {type(reply).__name__}")
            return Connection(sock, reply, path, reply_timeout_s=reply_timeout_s)
        except DeadlineExceeded as e:
            sock.close()
            raise Unavailable(f"{path}: connected, but no answer within {timeout_s} s") from e
        except ConnectionClosed as e:  # a daemon on its way out accepted us: its successor will answer
            sock.close()
            _retry_or_raise(deadline, path, timeout_s, e)
        except BaseException:
            sock.close()
            raise


def _connect(path: Path, deadline: float) -> socket.socket:
    start = time.monotonic()
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            sock.connect(str(path))
            return sock
        except OSError as e:
            sock.close()
            if isinstance(e, PermissionError):
                raise Denied(f"{path}: permission denied") from e
            if isinstance(e, FileNotFoundError | NotADirectoryError):
                raise Unavailable(f"{path}: no socket there") from e
            if isinstance(e, ConnectionRefusedError):
                raise Unavailable(f"{path}: nobody listens (connection refused)") from e
            if e.errno == errno.EPROTOTYPE:
                raise Unavailable(f"{path}: not a wcache socket (wrong socket type)") from e
            if not isinstance(e, TimeoutError | BlockingIOError | InterruptedError):
                raise Unavailable(f"{path}: {e.strerror or e}") from e  # a path that is too long has no number
            _retry_or_raise(deadline, path, deadline - start, e)


def _retry_or_raise(deadline: float, path: Path, timeout_s: float, cause: Exception) -> None:
    if time.monotonic() + _RETRY_S >= deadline:
        raise Unavailable(f"{path}: nobody answered within {timeout_s:.1f} s") from cause
    time.sleep(_RETRY_S)
