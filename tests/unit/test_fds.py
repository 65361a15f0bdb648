# SPDX-License-Identifier: Apache-2.0
"""Descriptors have one owner, arrive close-on-exec, and never get lost in silence."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcache.errors import ConnectionClosed, DeadlineExceeded, FdLimit, ProtocolError, SegmentError
from wcache.host.fds import (
    MAX_FDS_PER_RECORD,
    MAX_RECORD_BYTES,
    OwnedFd,
    close_all,
    is_sealed,
    memfd,
    receive,
    seal,
    sealed_memfd,
    send,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a.settimeout(2)
    b.settimeout(2)
    with a, b:
        yield a, b


def open_fds() -> list[Path]:
    return list(Path("/proc/self/fd").iterdir())


def test_an_owned_fd_closes_unless_it_was_taken() -> None:
    r, w = os.pipe()
    with OwnedFd(r):
        taken = OwnedFd(w).take()
    os.fstat(taken)
    os.close(taken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(r)


def test_a_taken_fd_cannot_be_lent_any_more() -> None:
    fd = sealed_memfd("x", b"x")
    os.close(fd.take())
    with pytest.raises(ValueError, match="given away"):
        fd.fileno()


def test_fds_arrive_with_their_record_and_close_on_exec(pair: tuple[socket.socket, socket.socket]) -> None:
    with sealed_memfd("one", b"hello") as fd:
        send(pair[0], b"with", [fd])
        send(pair[0], b"without")
    record, fds = receive(pair[1])
    assert record == b"with"
    assert os.pread(fds[0].fileno(), 5, 0) == b"hello"
    assert fcntl.fcntl(fds[0].fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    close_all(fds)
    assert receive(pair[1]) == (b"without", [])


def test_lost_fds_are_an_error_and_those_that_came_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    fds = [sealed_memfd("x", b"x") for _ in range(20)]
    send(pair[0], b"many", fds)
    close_all(fds)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 5, hard))
    try:
        with pytest.raises(FdLimit):
            receive(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(open_fds()) == len(before)


def test_end_of_file_silence_and_oversize_are_three_different_errors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[1].settimeout(0.01)
    with pytest.raises(DeadlineExceeded):
        receive(pair[1])
    with pytest.raises(ProtocolError, match="at most"):
        send(pair[0], b"x" * (MAX_RECORD_BYTES + 1))
    pair[0].send(b"x" * (MAX_RECORD_BYTES + 1))
    with pytest.raises(ProtocolError, match="longer than"):
        receive(pair[1])
    pair[0].close()
    with pytest.raises(ConnectionClosed):
        receive(pair[1])


def test_more_fds_than_a_record_takes_are_refused_before_anything_is_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with sealed_memfd("x", b"x") as fd, pytest.raises(ProtocolError, match="descriptors"):
        send(pair[0], b"x", [fd] * (MAX_FDS_PER_RECORD + 1))


def test_a_sealed_memfd_can_be_neither_written_nor_resized() -> None:
    with sealed_memfd("x", b"data") as fd:
        assert is_sealed(fd)
        with pytest.raises(PermissionError):
            os.pwrite(fd.fileno(), b"y", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd.fileno(), 1)


def test_sealing_is_refused_while_a_writable_mapping_lives() -> None:
    with (
        memfd("x", mmap.PAGESIZE) as fd,
        mmap.mmap(fd.fileno(), mmap.PAGESIZE),
        pytest.raises(SegmentError, match="EBUSY"),
    ):
        seal(fd, "segment 3 of rank 1")


def test_a_pipe_is_not_a_sealed_memfd() -> None:
    r, w = os.pipe()
    with OwnedFd(r), OwnedFd(w) as fd:
        assert not is_sealed(fd)
