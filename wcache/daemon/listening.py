# SPDX-License-Identifier: Apache-2.0
"""The rank's address: an inherited socket or one bound under the lock, and the thread that accepts on it.

Runs in the daemon. `Listener` owns socket and lock; `Acceptor` owns the sessions. A socket file that a cleaner removed
is bound again (ours) or reported (systemd's). More connections than MAX_CONNECTIONS are told that we are busy.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import stat
import threading
import time
from pathlib import Path

from wcache.config import Config
from wcache.daemon.rank import Rank
from wcache.daemon.session import Session
from wcache.errors import Busy, ConfigError, SystemdError, WcacheError
from wcache.host.fds import OwnedFd, send
from wcache.host.lock import BoundSocket, holds, socket_path_of, take_lock
from wcache.host.systemd import Inherited, listening_socket
from wcache.protocol.messages import Failure, encode

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
PATH_CHECK_S = 2.0
NO_DESCRIPTORS_PAUSE_S = 0.2
CLOSE_TIMEOUT_S = 2.0


class Listener:
    """`sock` listens at `path`. `bound`: it is ours to bind again and to remove; None when systemd passed it in."""

    def __init__(self, path: Path, sock: socket.socket, lock: OwnedFd | None, bound: BoundSocket | None) -> None:
        self.path = path
        self.sock = sock
        self._lock = lock
        self._bound = bound
        self._inode = _inode(path)
        sock.setblocking(False)  # a client that gave up between poll and accept must not block the others

    def repair(self, config: Config) -> str:
        """See that the path still leads here; bind again if it was removed. Returns what is wrong, "" if nothing."""
        there = _inode(self.path)
        if there is not None and there == self._inode:
            return ""
        if there is not None:
            return f"{self.path} was replaced by somebody else: nobody can reach this rank"
        if self._bound is None:
            return f"{self.path} was removed: restart its socket unit"
        try:
            self._bind_again(config)
        except (WcacheError, OSError) as e:
            return f"{self.path} was removed and could not be made again: {e}"
        log.warning("%s was removed by somebody; made again", self.path)
        return ""

    def _bind_again(self, config: Config) -> None:
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self._lock is None or not holds(self._lock, self.path):
            self._lock = take_lock(self.path)
        fresh = BoundSocket(self.path, self._lock, config.allowed_uids + config.publish_uids, config.allowed_gids)
        self.sock.close()
        self.sock, self._bound, self._inode = fresh.sock, fresh, fresh.inode
        self.sock.setblocking(False)

    def close(self) -> None:
        if self._bound is not None:
            self._bound.close(unlink=True)
        else:
            self.sock.close()
        if self._lock is not None:
            self._lock.close()


def listen(config: Config, path: Path, inherited: list[Inherited]) -> Listener:
    """The rank's listening socket; takes the socket out of `inherited`. Raises Busy, ConfigError, SystemdError."""
    sockets = [one for one in inherited if stat.S_ISSOCK(os.fstat(one.fd.fileno()).st_mode)]
    if len(sockets) > 1:
        raise SystemdError(f"{len(sockets)} sockets were passed in; a rank listens on one")
    if sockets:
        inherited.remove(sockets[0])
        return _activated(sockets[0])
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"make socket directory {path.parent}: {e.strerror}") from e
    lock = take_lock(path)
    bound = BoundSocket(path, lock, config.allowed_uids + config.publish_uids, config.allowed_gids)
    return Listener(path, bound.sock, lock, bound)


def _activated(inherited: Inherited) -> Listener:
    sock = listening_socket(inherited)
    try:
        path = socket_path_of(sock)
        lock: OwnedFd | None = None
        try:
            lock = take_lock(path)
        except ConfigError as e:  # a directory that is only systemd's to write to: it starts one instance anyway
            log.warning("serving without a lock: %s", e)
        return Listener(path, sock, lock, None)
    except BaseException:
        sock.close()
        raise


class Acceptor:
    """Accepts until the daemon stops. `run` is a thread's target; the rest may be called from any thread."""

    def __init__(self, listener: Listener, rank: Rank, stop: OwnedFd) -> None:
        self._listener = listener
        self._rank = rank
        self._stop = stop
        self._lock = threading.Lock()
        self._sessions: dict[int, tuple[Session, threading.Thread]] = {}
        self._count = 0
        self._closed = False

    def run(self) -> None:
        checked = time.monotonic()
        while True:
            poll = select.poll()
            poll.register(self._listener.sock.fileno(), select.POLLIN)
            poll.register(self._stop.fileno(), select.POLLIN)
            ready = {fd for fd, _ in poll.poll(PATH_CHECK_S * 1000)}
            if self._stop.fileno() in ready:
                return
            if ready:
                self._accept()
            if time.monotonic() - checked >= PATH_CHECK_S:
                self._rank.trouble = self._listener.repair(self._rank.who.config)
                checked = time.monotonic()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            log.warning("cannot accept: %s", e)
            poll = select.poll()
            poll.register(self._stop.fileno(), select.POLLIN)
            poll.poll(NO_DESCRIPTORS_PAUSE_S * 1000)
            return
        sock.setblocking(True)
        self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        with self._lock:
            full = len(self._sessions) >= MAX_CONNECTIONS
            self._count += 1
            number = self._count
        if full or self._closed:
            _refuse(sock)
            return
        session = Session(number, sock, self._rank)
        thread = threading.Thread(target=self._run, args=(number, session), name=f"wcache-{number}", daemon=True)
        with self._lock:
            self._sessions[number] = (session, thread)
        try:
            thread.start()
        except RuntimeError as e:  # no more threads (TasksMax=)
            log.warning("cannot serve another connection: %s", e)
            with self._lock:
                del self._sessions[number]
            _refuse(sock)

    def _run(self, number: int, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.pop(number, None)

    def drop(self, number: int) -> None:
        with self._lock:
            found = self._sessions.get(number)
        if found is not None:
            found[0].drop()

    def close(self) -> None:
        """End every session; their threads get a moment to give back what they hold."""
        self._closed = True
        with self._lock:
            sessions = list(self._sessions.values())
        for session, _ in sessions:
            session.drop()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for _, thread in sessions:
            thread.join(max(0.0, deadline - time.monotonic()))


def _refuse(sock: socket.socket) -> None:
    with sock:
        sock.settimeout(0.1)
        try:
            send(sock, encode(Failure.of(Busy(f"more than {MAX_CONNECTIONS} connections"))))
        except WcacheError:
            return


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        st = path.lstat()
    except OSError:
        return None
    return st.st_dev, st.st_ino
