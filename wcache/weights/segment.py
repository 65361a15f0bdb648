# SPDX-License-Identifier: Apache-2.0
"""A segment is contiguous memory that has exactly one fd. This file owns the interface of the two backends.

`host` (sealed memfd) and `cuda` (VMM allocations with POSIX fd handles) stand beside each other behind it; nothing
above asks which one it has. No torch here.
Fill a `WritableSegment`, `seal()` it (which ends every writable mapping of ours), publish the fd.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from wcache.host.fds import OwnedFd
from wcache.model import BackendName

SEGMENT_BYTES = 2 << 30  # segments are planned up to this size; a larger storage gets a segment of its own


class Access(StrEnum):
    """`READ`: engines. `READ_WRITE` on the host means private pages: writes stay with the writer (copy on write)."""

    READ = "r"
    READ_WRITE = "rw"


class Memory(Protocol):
    """An object whose life keeps some memory mapped; supports weak references.

    On the host it is the `mmap` itself (buffer protocol); on a GPU it is a `DeviceMemory` (address and size).
    `wcache.engine.tensors` is the one place that turns either into torch storages.
    """


class WritableSegment(Protocol):
    """Memory being filled by its one writer. `close` before `seal` frees it; `size` asked, `aligned_size` granted."""

    @property
    def size(self) -> int: ...

    @property
    def aligned_size(self) -> int: ...

    def memory(self) -> Memory:
        """What a tensor can be laid over. Nothing may hold it any more when `seal` is called on the host."""

    def digest(self) -> str:
        """ "algorithm:hex" over the first `size` bytes as they are now. Padding behind them is zero."""

    def seal(self) -> OwnedFd:
        """Make the bytes immutable where the backend can, end our writable mapping where it must, give the fd away."""

    def close(self) -> None: ...


class Mapping(Protocol):
    """Segments mapped into this process, in the order of the fds. They stay mapped while any `memory` lives."""

    def memory(self, index: int) -> Memory: ...

    def digest(self, index: int) -> str:
        """ "algorithm:hex" over the `size` bytes of a segment, recomputed now."""

    def close(self) -> None:
        """Unmap what nobody holds any more; the rest goes when its holders die."""


class Backend(Protocol):
    """What a kind of memory can do. `device`: "cpu" or a GPU's UUID."""

    @property
    def name(self) -> BackendName: ...

    @property
    def device(self) -> str: ...

    @property
    def granularity(self) -> int:
        """Every aligned size is a multiple of it (bytes)."""

    def available(self) -> int:
        """Bytes that can be allocated now."""

    def usage(self) -> str:
        """For a message about memory: what is free of how much, and where it can be told, who has the rest."""

    def create(self, name: str, size: int) -> WritableSegment:
        """Allocate zeroed memory. Raises OutOfMemory with needed and free bytes, SegmentError."""

    def map(self, fds: Sequence[OwnedFd], sizes: Sequence[int], access: Access = Access.READ) -> Mapping:
        """Map published segments (`sizes`: bytes in use, in order); the fds stay the caller's.

        Raises SegmentError for an fd that is no segment of this backend, is not sealed, or is too short.
        """


def open_backend(name: BackendName, device: str) -> Backend:
    """The backend of a rank. Raises BackendError with a hint when this machine cannot have it."""
    if name is BackendName.HOST:
        from wcache.weights.segment_host import HostBackend

        return HostBackend()
    from wcache.weights.segment_cuda import CudaBackend

    return CudaBackend(device)
