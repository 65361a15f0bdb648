# SPDX-License-Identifier: Apache-2.0
"""One daemon per socket path: a lock for its whole life, and a socket file that is only ever removed by its owner.

Runs in the daemon. flock(2) on a sibling `PATH.lock`, which is never removed; the kernel drops it with the process,
however that ends. Surprising: no errno of connect(2) proves a socket stale (a stopped daemon, a socket that is bound
but does not listen yet, and a regular file all refuse); only the lock does. And unlinking is for sockets alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Collection
from pathlib import Path

from wcache.errors import Busy, ConfigError, SystemdError
from wcache.host.fds import OwnedFd

log = logging.getLogger(__name__)

BACKLOG = 4096  # a full queue answers EAGAIN at once; more than the engines that may start together


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def take_lock(path: Path) -> OwnedFd:
    """Hold `path` (a socket's path) as long as the descriptor is open. Raises Busy, ConfigError."""
    file = lock_path(path)
    while True:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = OwnedFd(os.open(file, flags, 0o600))
        except OSError as e:
            raise ConfigError(f"open lock {file}: {e.strerror}") from e
        try:
            fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            fd.close()
            if e.errno == errno.EWOULDBLOCK:
                raise Busy(
                    f"{path}: another daemon holds {file}: it runs, or is stopped or hung (already_running_or_unknown)",
                    hint=f"`fuser {file}` names it; it is replaced only when it has ended",
                ) from e
            raise ConfigError(f"lock {file}: {e.strerror}") from e
        if holds(fd, path):
            return fd
        fd.close()  # somebody removed the file between open and lock: what we hold protects nothing


def holds(lock: OwnedFd, path: Path) -> bool:
    """True while the lock file in the directory is the one we hold."""
    try:
        there = lock_path(path).lstat()
    except OSError:
        return False
    ours = os.fstat(lock.fileno())
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


class BoundSocket:
    """A listening socket at a path that is ours. `inode` tells whether the file there still is."""

    def __init__(self, path: Path, lock: OwnedFd, uids: Collection[int] = (), gids: Collection[int] = ()) -> None:
        self.path = path
        _clear(path, lock)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self.inode = self._bind()
            _open_to(path, uids, gids)
            self.sock.listen(BACKLOG)
        except BaseException:
            self.sock.close()
            raise

    def _bind(self) -> tuple[int, int]:
        # The mode of a socket's own inode is the one bind(2) gives the file (net/unix/af_unix.c): from the first moment
        # nobody but the owner gets in, and no thread sees another umask.
        os.fchmod(self.sock.fileno(), 0o600)
        try:
            self.sock.bind(str(self.path))
        except OSError as e:
            raise ConfigError(f"bind {self.path}: {e.strerror}") from e
        return _inode(self.path)

    def intact(self) -> bool:
        """True while the path leads to this socket."""
        try:
            return _inode(self.path) == self.inode
        except OSError:
            return False

    def close(self, *, unlink: bool) -> None:
        """Stop listening; remove the path if it is still ours."""
        if unlink and self.intact():
            self.path.unlink(missing_ok=True)
        self.sock.close()


def clear_stale(path: Path) -> bool:
    """Remove a socket whose daemon is gone; True if there was one. Raises Busy while a daemon lives."""
    if not path.parent.is_dir():
        return False
    with take_lock(path) as lock:
        return _clear(path, lock)


def _clear(path: Path, lock: OwnedFd) -> bool:
    if not holds(lock, path):
        raise Busy(f"{path}: the lock beside it was lost")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket", hint="it is not ours to remove; move it away")
    log.info("removing stale socket %s", path)
    path.unlink()
    return True


def _open_to(path: Path, uids: Collection[int], gids: Collection[int]) -> None:
    """Let the configured peers reach the socket; the daemon checks each one's credentials itself."""
    try:
        if set(uids) - {os.geteuid(), 0} or len(gids) > 1:
            path.chmod(0o666)
        elif gids:
            os.chown(path, -1, next(iter(gids)))
            path.chmod(0o660)
    except OSError as e:
        raise ConfigError(f"open {path} to the allowed uids and gids: {e.strerror}") from e


def socket_path_of(sock: socket.socket) -> Path:
    """Where an inherited socket listens. Raises SystemdError for one without a path."""
    name = sock.getsockname()
    if not isinstance(name, str) or not name:
        raise SystemdError("the inherited socket has no path", hint="ListenSequentialPacket= needs a path")
    return Path(name)


def _inode(path: Path) -> tuple[int, int]:
    st = path.lstat()
    return st.st_dev, st.st_ino
