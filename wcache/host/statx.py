# SPDX-License-Identifier: Apache-2.0
"""stat(2) that does not believe a cache: statx(2) with AT_STATX_FORCE_SYNC.

Runs in every process. NFS and FUSE clients answer stat from attributes that may be a minute old (nfs(5): acregmax), so
a file that another host has just rewritten would look unchanged. On local file systems the flag changes nothing.
Python has no binding before 3.15; glibc has the function since 2.28. The fields carry os.stat_result's names.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import NamedTuple

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC_STATS = 0x7FF
_BUFFER_BYTES = 256  # sizeof(struct statx)

# include/uapi/linux/stat.h: mode, inode and size; ctime and mtime; major and minor number of the device.
_IDENTITY = struct.Struct("=28xH2xQQ")
_TIMES = struct.Struct("=96xqI4xqI4x")
_DEVICE = struct.Struct("=136xII")


class FreshStat(NamedTuple):
    st_mode: int
    st_ino: int
    st_dev: int
    st_size: int
    st_mtime_ns: int
    st_ctime_ns: int


_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)


def fresh_stat(target: Path | int) -> FreshStat | os.stat_result:
    """Attributes of a path (symlinks followed) or of an open descriptor, asked of the server. Raises OSError."""
    if _statx is None:  # a C library without it: what the cache says is all there is
        return os.stat(target)  # noqa: PTH116 - a path or a descriptor
    path = b"" if isinstance(target, int) else os.fsencode(target)
    if b"\0" in path:
        raise ValueError(f"{target!r}: a NUL in a path")
    directory, flags = (target, _AT_EMPTY_PATH) if isinstance(target, int) else (_AT_FDCWD, 0)
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    if _statx(directory, path, flags | _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(target) if isinstance(target, Path) else target)
    raw = buffer.raw
    mode, inode, size = _IDENTITY.unpack_from(raw)
    ctime_s, ctime_ns, mtime_s, mtime_ns = _TIMES.unpack_from(raw)
    device = os.makedev(*_DEVICE.unpack_from(raw))
    return FreshStat(mode, inode, device, size, mtime_s * 10**9 + mtime_ns, ctime_s * 10**9 + ctime_ns)
