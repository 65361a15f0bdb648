# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory anybody opens for a while: the kernel's word (inotify(7)), not a mock's."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_IN_OPEN, _IN_NONBLOCK = 0x20, 0x800
_EVENT = struct.Struct("iIII")


@contextmanager
def opened(directory: Path) -> Iterator[list[str]]:
    """The names are there when the block has ended."""
    names: list[str] = []
    fd = _LIBC.inotify_init1(_IN_NONBLOCK)
    assert fd >= 0
    try:
        assert _LIBC.inotify_add_watch(fd, os.fsencode(directory), _IN_OPEN) >= 0
        yield names
        names += _names(fd)
    finally:
        os.close(fd)


def _names(fd: int) -> list[str]:
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return []
    names, at = [], 0
    while at < len(data):
        *_, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        names.append(data[at : at + length].rstrip(b"\0").decode())
        at += length
    return names
