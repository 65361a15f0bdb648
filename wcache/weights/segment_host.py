# SPDX-License-Identifier: Apache-2.0
"""The `host` backend: segments are sealed memfds.

The backend of CPU engines, of CI and of machines without a GPU: the same code path and real zero-copy sharing.
Engines map privately, so a stray write lands on pages of their own and nobody else sees it.
Surprising: F_SEAL_WRITE is refused (EBUSY) while any writable shared mapping lives, hence fill -> unmap -> seal.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence

import psutil

from wcache.errors import OutOfMemory, SegmentError
from wcache.host.fds import OwnedFd, is_sealed, memfd, seal
from wcache.model import CPU, BackendName
from wcache.weights.segment import Access

DIGEST_CHUNK_BYTES = 16 << 20


class HostBackend:
    name = BackendName.HOST
    device = CPU
    granularity = mmap.PAGESIZE

    def available(self) -> int:
        return int(psutil.virtual_memory().available)

    def usage(self) -> str:
        return f"{self.available()} of {psutil.virtual_memory().total} bytes are available"

    def create(self, name: str, size: int) -> HostSegment:
        free = self.available()
        if size > free:
            raise OutOfMemory(f"segment {name} needs {size} bytes of host memory, {free} are available")
        return HostSegment(name, size)

    def map(self, fds: Sequence[OwnedFd], sizes: Sequence[int], access: Access = Access.READ) -> HostMapping:
        return HostMapping(fds, sizes, access)


class HostSegment:
    """A memfd that its one writer fills through a shared mapping."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.aligned_size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._name = name
        self._fd = memfd(f"wcache:{name}", self.aligned_size)
        self._map = mmap.mmap(self._fd.fileno(), self.aligned_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def memory(self) -> mmap.mmap:
        return self._map

    def digest(self) -> str:
        return _digest(self._map, self.size)

    def seal(self) -> OwnedFd:
        try:
            self._map.close()
        except BufferError as e:
            raise SegmentError(f"seal {self._name}: a view of its memory is still alive") from e
        seal(self._fd, self._name)
        return OwnedFd(self._fd.take())

    def close(self) -> None:
        self._map.close()
        self._fd.close()


class HostMapping:
    """Sealed memfds mapped into this process, read-only or as private pages."""

    def __init__(self, fds: Sequence[OwnedFd], sizes: Sequence[int], access: Access) -> None:
        self._sizes = tuple(sizes)
        self._maps = [self._map_one(i, fd, n, access) for i, (fd, n) in enumerate(zip(fds, sizes, strict=True))]

    @staticmethod
    def _map_one(index: int, fd: OwnedFd, size: int, access: Access) -> mmap.mmap:
        if not is_sealed(fd):
            raise SegmentError(f"segment {index} is not a sealed memfd")
        length = os.fstat(fd.fileno()).st_size
        if length < max(size, 1):
            raise SegmentError(f"segment {index} has {length} bytes, {size} were promised")
        protection = mmap.PROT_READ if access is Access.READ else mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(fd.fileno(), length, mmap.MAP_PRIVATE, protection)

    def memory(self, index: int) -> mmap.mmap:
        return self._maps[index]

    def digest(self, index: int) -> str:
        return _digest(self._maps[index], self._sizes[index])

    def close(self) -> None:
        for m in self._maps:
            try:
                m.close()
            except BufferError:  # a tensor still stands on it: the mapping goes when the tensor does
                continue
        self._maps = []


def _digest(memory: mmap.mmap, size: int) -> str:
    h = hashlib.sha256()
    view = memoryview(memory)
    try:
        for start in range(0, size, DIGEST_CHUNK_BYTES):
            h.update(view[start : min(start + DIGEST_CHUNK_BYTES, size)])
    finally:
        view.release()
    return f"sha256:{h.hexdigest()}"
