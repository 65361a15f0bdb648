# SPDX-License-Identifier: Apache-2.0
"""Owned file descriptors, sealed memfds, and descriptors passed beside a SEQPACKET record.

Runs in every process. An `OwnedFd` closes its descriptor unless `take()` gave it away; everything is close-on-exec.
Surprising: Python's `socket.recv_fds` ignores its flags, and a receiver short of descriptors loses them with only
MSG_CTRUNC set (seen on Linux 6.18); `receive` treats both as what they are.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from wcache.errors import ConnectionClosed, DeadlineExceeded, FdLimit, ProtocolError, SegmentError

MAX_FDS_PER_RECORD = 128  # the kernel takes 253 (SCM_MAX_FD); a record of ours never needs more than this
MAX_RECORD_BYTES = 160 << 10  # SO_SNDBUF caps a record near 208 KiB
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class OwnedFd:
    """A descriptor with one owner. Use as a context manager, or hand on with `take()`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Lend the descriptor; it stays ours."""
        if self._fd < 0:
            raise ValueError("descriptor was closed or given away")
        return self._fd

    def take(self) -> int:
        """Give the descriptor away; the caller closes it."""
        fd, self._fd = self.fileno(), -1
        return fd

    def duplicate(self) -> OwnedFd:
        return OwnedFd(fcntl.fcntl(self.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> OwnedFd:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OwnedFd({self._fd})"


def close_all(fds: Iterable[OwnedFd]) -> None:
    """Close every descriptor; one that fails does not stop the next."""
    for fd in fds:
        try:
            fd.close()
        except OSError:  # EIO from a dead device: nothing is left to do with this descriptor
            continue


@contextmanager
def owning(fds: list[OwnedFd]) -> Iterator[list[OwnedFd]]:
    """Close the descriptors if the block fails; on success they belong to whoever the block gave them to."""
    try:
        yield fds
    except BaseException:
        close_all(fds)
        raise


def memfd(name: str, size: int) -> OwnedFd:
    """A writable memfd of `size` bytes that can be sealed (memfd_create(2)). Raises SegmentError."""
    fd = OwnedFd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        os.ftruncate(fd.fileno(), size)
    except OSError as e:
        fd.close()
        raise SegmentError(f"size memfd {name} to {size} bytes: {errno.errorcode.get(e.errno or 0, e.errno)}") from e
    return fd


def seal(fd: OwnedFd, what: str) -> None:
    """Make the bytes immutable for everybody, for ever. Raises SegmentError: EBUSY while a writable mapping lives."""
    try:
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS)
    except OSError as e:
        raise SegmentError(f"seal {what}: {errno.errorcode.get(e.errno or 0, e.errno)}") from e


def is_sealed(fd: OwnedFd) -> bool:
    """True if the descriptor is a memfd whose bytes and size can no longer change."""
    try:
        return fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # EINVAL: not a memfd
        return False


def sealed_memfd(name: str, data: bytes) -> OwnedFd:
    """A sealed memfd that holds `data`."""
    fd = memfd(name, 0)
    with os.fdopen(os.dup(fd.fileno()), "wb", buffering=0) as f:
        view = memoryview(data)
        while view:
            view = view[f.write(view) :]
    seal(fd, name)
    return fd


def send(sock: socket.socket, record: bytes, fds: Sequence[OwnedFd] = ()) -> None:
    """Send one record with descriptors beside it; they stay the caller's.

    The socket's timeout is the deadline. Raises DeadlineExceeded, ConnectionClosed, ProtocolError.
    """
    if len(record) > MAX_RECORD_BYTES:
        raise ProtocolError(f"a record of {len(record)} bytes; at most {MAX_RECORD_BYTES} are allowed")
    if len(fds) > MAX_FDS_PER_RECORD:
        raise ProtocolError(f"{len(fds)} descriptors in a record; at most {MAX_FDS_PER_RECORD} are allowed")
    numbers = array.array("i", [fd.fileno() for fd in fds])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers.tobytes())] if fds else []
    try:
        sock.sendmsg([record], ancillary)
    except TimeoutError as e:
        raise DeadlineExceeded(f"the peer did not read within {sock.gettimeout()} s") from e
    except (BrokenPipeError, ConnectionResetError) as e:
        raise ConnectionClosed("the peer closed the connection") from e
    except OSError as e:
        if e.errno == errno.ETOOMANYREFS:
            raise FdLimit(f"send {len(fds)} descriptors: ETOOMANYREFS: too many are in flight for this user") from e
        raise ProtocolError(f"send a record of {len(record)} bytes: {e.strerror}") from e


def receive(sock: socket.socket) -> tuple[bytes, list[OwnedFd]]:
    """Receive one record and the descriptors beside it, which are then the caller's.

    The socket's timeout is the deadline. Raises ConnectionClosed at end of file, DeadlineExceeded, FdLimit when
    descriptors were lost, ProtocolError when the record was cut; no descriptor leaks from a failed call.
    """
    space = socket.CMSG_SPACE(MAX_FDS_PER_RECORD * array.array("i").itemsize)
    try:
        record, ancillary, flags, _ = sock.recvmsg(MAX_RECORD_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError as e:
        raise DeadlineExceeded(f"the peer said nothing for {sock.gettimeout()} s") from e
    except ConnectionResetError as e:
        raise ConnectionClosed("the peer closed the connection") from e
    except OSError as e:
        raise ProtocolError(f"receive a record: {e.strerror}") from e
    fds = [OwnedFd(n) for level, kind, data in ancillary for n in _descriptors(level, kind, data)]
    with owning(fds):
        if flags & socket.MSG_CTRUNC:
            raise FdLimit("file descriptors were lost on the way (MSG_CTRUNC)")
        if flags & socket.MSG_TRUNC:
            raise ProtocolError(f"a record longer than {MAX_RECORD_BYTES} bytes")
        if not record:
            raise ConnectionClosed("the peer closed the connection")
    return record, fds


def _descriptors(level: int, kind: int, data: bytes) -> array.array[int]:
    numbers: array.array[int] = array.array("i")
    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
        numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return numbers
