# SPDX-License-Identifier: Apache-2.0
"""One checkpoint file: its stamp, and how it is opened as what was surveyed, or refused.

Runs in every process that reads a checkpoint. Whoever opens a file closes it, and asks `check_unmoved` once more when
it has been read: only then are the bytes in memory those of one version.
Surprising: a process with a shared writable mapping moves mtime and ctime only when it writes to a page that is clean;
it may go on writing to a dirty page unseen. `write_back` comes before hashing, so that each later store is noticed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from wcache.errors import CheckpointError
from wcache.host.fds import OwnedFd
from wcache.host.statx import FreshStat, fresh_stat
from wcache.model import CheckpointFault
from wcache.weights.directory import open_regular

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What stat(2) says about a file: if it moved, the bytes may have changed. Never a proof on its own."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, st: os.stat_result | FreshStat) -> Stamp:
        return cls(st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)

    def unmoved(self, later: Stamp) -> bool:
        """Size and times are the same. Inode numbers are left out: some network mounts change them at will."""
        return (self.size, self.mtime_ns, self.ctime_ns) == (later.size, later.mtime_ns, later.ctime_ns)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of weights. `blob`: the SHA-256 that a hub cache claims for it by the name of its blob."""

    name: str
    path: Path
    stamp: Stamp
    blob: str | None


def open_surveyed(file: CheckpointFile, *, hashed: bool = False) -> OwnedFd:
    """Open a file to read it; `hashed`: its bytes are hashed as they pass. Raises CheckpointError if it has moved."""
    fd = open_regular(file.path, file.name)
    try:
        if hashed:
            write_back(fd.fileno())
        check_unmoved(file, fd, "after it was surveyed")
    except BaseException:
        fd.close()
        raise
    return fd


def check_unmoved(file: CheckpointFile, fd: OwnedFd, when: str) -> None:
    """Raises CheckpointError(CHANGED_WHILE_READING) if an open file is no longer what was surveyed."""
    if not file.stamp.unmoved(Stamp.of(fresh_stat(fd.fileno()))):
        raise moved(f"{file.path}: changed {when}")


def moved(message: str) -> CheckpointError:
    """The error for files that are no longer what was surveyed."""
    hint = "is something still writing the checkpoint? start again when it is done"
    return CheckpointError(CheckpointFault.CHANGED_WHILE_READING, message, hint=hint)


def write_back(fd: int) -> None:
    """Have a file's dirty pages written back before it is hashed (fsync(2) needs no write access).

    That makes pages clean and write-protects them again, so that each later store faults, moves ctime, and is noticed.
    (mmap(2): st_ctime and st_mtime; seen so on ext4, Linux 6.18.)
    """
    try:
        os.fsync(fd)
    except OSError as e:  # EROFS, EINVAL: a file system that has nothing to write back
        log.debug("fsync before hashing: %s", e)
