# SPDX-License-Identifier: Apache-2.0
"""A lock file held with flock(2): the kernel lets go when the holder dies, and the file goes with the last holder.

Runs in every process. Surprising: whoever removes a lock file must hold its lock, and whoever got the lock must check
that the file it locked is still the one under that name; otherwise two processes hold "the" lock on two inodes.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from wcache.host.fds import OwnedFd

POLL_S = 0.02


class FileLock:
    """An exclusive lock that is held from construction by `acquire` or `try_acquire` until `release`."""

    __slots__ = ("_fd", "_path")

    def __init__(self, path: Path, fd: OwnedFd) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def try_acquire(cls, path: Path) -> FileLock | None:
        """The lock, or None while another process (or another FileLock of this one) holds it. Raises OSError."""
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        while True:
            # 0600: flock needs no more than an open descriptor, so a reader could hold the lock for ever.
            fd = OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            try:
                fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fd.close()
                return None
            except BaseException:
                fd.close()
                raise
            if _is_at(fd, path):
                return cls(path, fd)
            fd.close()

    @classmethod
    def acquire(cls, path: Path, timeout_s: float) -> FileLock:
        """Wait for the lock. Raises TimeoutError, OSError."""
        deadline = time.monotonic() + timeout_s
        while (lock := cls.try_acquire(path)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} stayed locked for {timeout_s} s")
            time.sleep(POLL_S)
        return lock

    def release(self) -> None:
        """Remove the file and let go; idempotent."""
        fd, self._fd = self._fd, OwnedFd(-1)
        try:
            if _is_at(fd, self._path):
                self._path.unlink(missing_ok=True)
        finally:
            fd.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _is_at(fd: OwnedFd, path: Path) -> bool:
    """Whether the descriptor's file is the one under this name."""
    try:
        ours, there = os.fstat(fd.fileno()), path.lstat()
    except (FileNotFoundError, ValueError):  # ValueError: already released
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
