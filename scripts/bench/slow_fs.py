# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - FUSE gives each operation a path and a handle
"""A read-only FUSE passthrough where each open and each read takes a while, as on an object-store mount.

    python scripts/bench/slow_fs.py LOWER MOUNTPOINT --delay 0.5 --log FILE

Runs in the foreground until it is unmounted (fusermount3 -u MOUNTPOINT). `--log` gets a line for each open, with the
path. Inode numbers are the mount's own (libfuse hands them out as names are looked up), so they change from mount to
mount, as on the file systems it stands for. Needs fusepy, libfuse2 and /dev/fuse; `slow_mount` is what benches use.
"""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuse import FUSE, FuseOSError, Operations

MOUNT_TIMEOUT_S = 10.0


class SlowPassthrough(Operations):
    """`delay_s` passes before each open and each read, of as many threads at once as ask."""

    def __init__(self, lower: Path, delay_s: float, log: Path | None) -> None:
        self._lower = lower
        self._delay_s = delay_s
        self._log = log.open("a", buffering=1) if log else None

    def _real(self, path: str) -> Path:
        return self._lower / path.lstrip("/")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, float]:
        try:
            st = self._real(path).lstat()
        except OSError as e:
            raise FuseOSError(e.errno or errno.EIO) from e
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime", "st_mtime", "st_ctime")
        return {name: getattr(st, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *(p.name for p in self._real(path).iterdir())]

    def readlink(self, path: str) -> str:
        return str(self._real(path).readlink())

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise FuseOSError(errno.EROFS)
        if self._log:
            self._log.write(path + "\n")
        time.sleep(self._delay_s)
        return os.open(self._real(path), os.O_RDONLY | os.O_CLOEXEC)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        time.sleep(self._delay_s)
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


@contextmanager
def slow_mount(lower: Path, mountpoint: Path, delay_s: float, log: Path) -> Iterator[Path]:
    """The file system mounted for the length of the block, served by a child process."""
    mountpoint.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(lower), str(mountpoint), "--delay", str(delay_s), "--log", str(log)]
    child = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + MOUNT_TIMEOUT_S
        while not os.path.ismount(mountpoint):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{mountpoint} was not mounted: is there a /dev/fuse, and libfuse2?")
            time.sleep(0.02)
        yield mountpoint
    finally:
        subprocess.run(["fusermount3", "-u", str(mountpoint)], check=False)
        try:
            child.wait(MOUNT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lower", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    operations = SlowPassthrough(options.lower.resolve(), options.delay, options.log)
    FUSE(operations, str(options.mountpoint), foreground=True, nothreads=False, ro=True, fsname="slow_fs")


if __name__ == "__main__":
    main()
