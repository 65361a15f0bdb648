# SPDX-License-Identifier: Apache-2.0
"""The CUDA sink: file bytes go through a ring of page-locked buffers, disk, hashing and the bus overlapped.

Runs in the loader child. A landing is one buffer of the ring, read into and hashed there; `commit` enqueues a copy for
each of its pieces (strided rows are one) and an event, and the buffer can be had again once its event is over.
All copies share one stream: the bus takes them one after the other anyway. On the GPU nothing but the segments is used.
Only a piece that casts goes through ordinary memory, converted by torch, which is imported then.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from wcache.host.gpu import Gpu, Handle, quietly
from wcache.weights.segment import Backend, WritableSegment
from wcache.weights.segment_cuda import CudaBackend, DeviceMemory
from wcache.weights.sink import CHUNK_BYTES, STAGING_BYTES, Chunk, Copy, elements

if TYPE_CHECKING:
    import torch

_WHAT = "the staging of a load"


class CudaSink:
    """Fills segments whose `memory()` is a DeviceMemory."""

    def __init__(self, backend: Backend, segments: Sequence[WritableSegment]) -> None:
        self._gpu = cast(CudaBackend, backend).gpu
        self._targets = [cast(DeviceMemory, s.memory()) for s in segments]
        self._stream: Handle | None = self._gpu.stream(_WHAT)
        self._ring = _Ring(self._gpu, STAGING_BYTES // CHUNK_BYTES)

    def land(self, chunk: Chunk) -> CudaLanding:
        return CudaLanding(self, chunk, self._ring.take())

    def finish(self) -> None:
        self._gpu.wait_stream(self._stream, "the copies of a load")

    def close(self) -> None:
        stream, self._stream = self._stream, None
        self._targets = []
        if stream is not None:
            quietly(self._gpu.wait_stream, stream, _WHAT)  # after a failure copies may still read the buffers
            quietly(self._gpu.destroy_stream, stream, _WHAT)
        self._ring.close()

    def bring(self, chunk: Chunk, buffer: _Buffer) -> None:
        """Enqueue every copy of a chunk, then let the buffer go; one that casts is waited for.

        A copy that fails ends the load: the buffer is not used again, `close` frees it.
        """
        casted = [self._bring_one(copy, buffer) for copy in chunk.copies]
        self._gpu.record(buffer.event, self._stream, _WHAT)
        if any(tensor is not None for tensor in casted):
            self._gpu.wait_event(buffer.event, _WHAT)
        self._ring.launched(buffer)

    def drop(self, buffer: _Buffer) -> None:
        """The read into the buffer failed; nothing was enqueued from it."""
        self._ring.give_back(buffer)

    def _bring_one(self, copy: Copy, buffer: _Buffer) -> torch.Tensor | None:
        """Enqueue one copy. Returns the memory it is read from, if that is not the buffer."""
        target = self._targets[copy.segment].address + copy.target
        if not copy.casts:
            self._rows(target, copy.target_pitch, buffer.address + copy.start, copy.pitch, copy.run, copy.rows, copy)
            return None
        tensor = _cast(copy, buffer.view(copy.start, copy.span))
        run = tensor.shape[1] * tensor.dtype.itemsize
        self._rows(target, copy.target_pitch, tensor.data_ptr(), run, run, copy.rows, copy)
        return tensor

    def _rows(self, target: int, pitch: int, source: int, source_pitch: int, run: int, rows: int, copy: Copy) -> None:
        what = f"segment-{copy.segment}"
        if rows == 1 or pitch == source_pitch == run:
            self._gpu.copy_in(target, source, run * rows, self._stream, what)
        else:
            self._gpu.copy_in_rows(target, pitch, source, source_pitch, run, rows, self._stream, what)


class CudaLanding:
    def __init__(self, sink: CudaSink, chunk: Chunk, buffer: _Buffer) -> None:
        self._sink = sink
        self._chunk = chunk
        self._buffer = buffer
        self.buffers = [buffer.view(0, chunk.size)]

    def commit(self) -> None:
        self._release()
        self._sink.bring(self._chunk, self._buffer)

    def abandon(self) -> None:
        self._release()
        self._sink.drop(self._buffer)

    def _release(self) -> None:
        for view in self.buffers:
            view.release()
        self.buffers = []


@dataclass(frozen=True, slots=True)
class _Buffer:
    """CHUNK_BYTES of page-locked memory, and the event that says when it was last read from."""

    address: int
    event: Handle

    def view(self, start: int, size: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * size).from_address(self.address + start)).cast("B")


class _Ring:
    """At most `limit` buffers, made when first needed; `take` waits for the one whose copies end first."""

    def __init__(self, gpu: Gpu, limit: int) -> None:
        self._gpu = gpu
        self._limit = limit
        self._changed = threading.Condition()
        self._made: list[_Buffer] = []
        self._making = 0
        self._free: list[_Buffer] = []
        self._under_way: deque[_Buffer] = deque()

    def take(self) -> _Buffer:
        with self._changed:
            self._changed.wait_for(self._any)
            if self._free:
                return self._free.pop()
            if self._under_way and self._making + len(self._made) >= self._limit:
                buffer = self._under_way.popleft()
            else:
                self._making += 1
                buffer = None
        if buffer is None:
            return self._make()
        self._gpu.wait_event(buffer.event, _WHAT)
        return buffer

    def _any(self) -> bool:
        return bool(self._free or self._under_way) or self._making + len(self._made) < self._limit

    def launched(self, buffer: _Buffer) -> None:
        """Copies from the buffer are enqueued and its event recorded behind them."""
        with self._changed:
            self._under_way.append(buffer)
            self._changed.notify()

    def give_back(self, buffer: _Buffer) -> None:
        """Nothing was enqueued from the buffer."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        """Nothing is under way any more."""
        with self._changed:
            for buffer in self._made:
                quietly(self._gpu.destroy_event, buffer.event, _WHAT)
                quietly(self._gpu.unpin, buffer.address, _WHAT)
            self._made, self._free = [], []
            self._under_way.clear()

    def _make(self) -> _Buffer:
        try:
            with ExitStack() as undo:
                event = self._gpu.event(_WHAT)
                undo.callback(self._gpu.destroy_event, event, _WHAT)
                buffer = _Buffer(self._gpu.pin(CHUNK_BYTES, _WHAT), event)
                undo.pop_all()
        except BaseException:
            with self._changed:
                self._making -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._making -= 1
            self._made.append(buffer)
        return buffer


def _cast(copy: Copy, source: memoryview) -> torch.Tensor:
    """The elements of one copy converted, [rows, run], dense. Rounds as `Tensor.to` does."""
    import torch

    return elements(copy, source).to(getattr(torch, copy.dtype)).contiguous()
