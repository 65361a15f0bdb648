# SPDX-License-Identifier: Apache-2.0
"""The host sink: the kernel scatters file bytes straight into memfds; staging takes only what no copy wants.

Runs in the loader child. A landing's buffers alternate between slices of segment memory and slices of one staging
buffer, in file order: `preadv` needs no copy afterwards, strided (row-parallel) runs included. Only a copy that casts,
or one of a great many short runs, is read into staging whole and copied on commit, by torch, which is imported then.
Every view of segment memory is released by `commit`, `abandon` or `close`: a memfd with a living view cannot be sealed.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import cast

from wcache.weights.segment import WritableSegment
from wcache.weights.sink import CHUNK_BYTES, STAGING_BYTES, Chunk, Copy, elements

SHORT_RUN_BYTES = 4096  # thousands of buffers shorter than this cost more than a second copy
MANY_ROWS = 1024


class HostSink:
    """Fills segments whose `memory()` is an mmap."""

    def __init__(self, segments: Sequence[WritableSegment]) -> None:
        self._views = [memoryview(cast(mmap.mmap, s.memory())) for s in segments]
        self._staging = _Staging(STAGING_BYTES // CHUNK_BYTES)

    def land(self, chunk: Chunk) -> HostLanding:
        direct = sum(c.rows * c.run for c in chunk.copies if not _is_staged(c))
        staging = self._staging.take() if direct < chunk.size else None
        return HostLanding(chunk, self._views, staging, self._staging)

    def finish(self) -> None:
        """Nothing is under way after the last commit."""

    def close(self) -> None:
        for view in self._views:
            view.release()
        self._views = []
        self._staging.close()


class HostLanding:
    def __init__(self, chunk: Chunk, segments: Sequence[memoryview], staging: mmap.mmap | None, pool: _Staging) -> None:
        self._chunk = chunk
        self._segments = segments
        self._staging = staging
        self._pool = pool
        self._room = memoryview(staging) if staging is not None else None
        self.buffers = [self._view(*part) for part in _parts(chunk)]

    def _view(self, segment: int | None, start: int, size: int) -> memoryview:
        if segment is not None:
            return self._segments[segment][start : start + size]
        if self._room is None:
            raise ValueError("a landing without staging wants staging")
        return self._room[start : start + size]

    def commit(self) -> None:
        try:
            for copy in self._chunk.copies:
                if _is_staged(copy) and self._room is not None:
                    _copy(copy, self._room, self._segments[copy.segment])
        finally:
            self.abandon()

    def abandon(self) -> None:
        for view in self.buffers:
            view.release()
        self.buffers = []
        if self._room is not None and self._staging is not None:
            self._room.release()
            self._pool.give_back(self._staging)
            self._room = self._staging = None


def _is_staged(copy: Copy) -> bool:
    return copy.casts or (copy.run < SHORT_RUN_BYTES and copy.rows > MANY_ROWS)


def _parts(chunk: Chunk) -> Iterator[tuple[int | None, int, int]]:
    """The chunk as (segment, offset in it, size), or (None, offset in staging, size), in file order without a gap."""
    position = 0
    for copy in chunk.copies:
        if _is_staged(copy):
            continue
        for row in range(copy.rows):
            start = copy.start + row * copy.pitch
            if start > position:
                yield None, position, start - position
            yield copy.segment, copy.target + row * copy.target_pitch, copy.run
            position = start + copy.run
    if chunk.size > position:
        yield None, position, chunk.size - position


def _copy(copy: Copy, staging: memoryview, segment: memoryview) -> None:
    """Bring the elements of one copy from staging to its segment; a cast rounds as `Tensor.to` does."""
    import torch

    source = elements(copy, staging[copy.start : copy.start + copy.span])
    rows, run = source.shape
    dtype = getattr(torch, copy.dtype) if copy.casts else source.dtype
    step = copy.target_pitch // dtype.itemsize
    target = torch.frombuffer(segment, dtype=dtype, count=(rows - 1) * step + run, offset=copy.target)
    target.as_strided((rows, run), (step, 1)).copy_(source)


class _Staging:
    """Buffers of CHUNK_BYTES, made when first needed, at most `limit`; `take` waits for one."""

    def __init__(self, limit: int) -> None:
        self._slots = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        self._slots.acquire()
        with self._lock:
            if self._free:
                return self._free.pop()
        return mmap.mmap(-1, CHUNK_BYTES)

    def give_back(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._free.append(buffer)
        self._slots.release()

    def close(self) -> None:
        with self._lock:
            for buffer in self._free:
                buffer.close()
            self._free = []
