# SPDX-License-Identifier: Apache-2.0
"""Where the reader's bytes go: the interface between reading checkpoint files and filling segments.

`weights/load.py` reads; a sink owns every destination: `sink_host.py` scatters straight into memfds, `sink_cuda.py`
goes through pinned staging. Runs in the loader child. The reader never sees segment memory, a sink never sees a file.

The reader cuts files into chunks of at most CHUNK_BYTES, and for each chunk, from any of its threads:

    landing = sink.land(chunk)      # may block until staging is free
    ... fill landing.buffers in order with the chunk's bytes; perhaps hash them ...
    landing.commit()                # or landing.abandon()

A reader thread holds at most LANDINGS_PER_THREAD landings and commits them in the order in which it got them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wcache.model import BackendName
from wcache.weights.segment import Backend, WritableSegment

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16 << 20  # at most; a file is read in pieces of this size
LANDINGS_PER_THREAD = 2  # one being filled while the one before it is hashed
STAGING_BYTES = 256 << 20  # all staging of one load together


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a chunk that goes into a segment: `rows` runs, evenly spaced on both sides. Numbers are bytes.

    `start` counts from the chunk's first byte. Source run `i` is [start + i * pitch, + run); its place in the segment
    starts at target + i * target_pitch and is `run` bytes long, or that times the ratio of the dtypes' sizes where
    they differ: then the elements are cast (`run` and both pitches are whole elements; `start` need not be aligned).
    """

    start: int
    rows: int
    run: int
    pitch: int
    segment: int
    target: int
    target_pitch: int
    source_dtype: str
    dtype: str

    @property
    def casts(self) -> bool:
        return self.source_dtype != self.dtype

    @property
    def span(self) -> int:
        """Bytes of the chunk from the first run's start to the last one's end."""
        return (self.rows - 1) * self.pitch + self.run


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous piece of a checkpoint file: `size` bytes from `offset`, at most CHUNK_BYTES.

    `copies` are sorted by `start` and their spans do not overlap. Bytes that no copy wants are read all the same
    (a small gap, the other ranks' columns, a file that is hashed as a whole) and must land somewhere.
    """

    offset: int
    size: int
    copies: tuple[Copy, ...]


class Landing(Protocol):
    """Room for one chunk. Exactly one of `commit` and `abandon` is called, once."""

    @property
    def buffers(self) -> Sequence[memoryview]:
        """Writable byte views that take the chunk's bytes in order; their lengths sum to `chunk.size`.

        They hold the file's bytes until `commit` (the reader hashes them there), and are released by both endings.
        """

    def commit(self) -> None:
        """The buffers are full: bring every copy to its segment (perhaps not finished yet), let staging go."""

    def abandon(self) -> None:
        """The read failed: let staging go; what lies in the segments no longer matters. Never raises."""


class Sink(Protocol):
    """Safe for several threads at once. Holds at most STAGING_BYTES of staging."""

    def land(self, chunk: Chunk) -> Landing:
        """Room for a chunk; waits for staging that other landings hold."""

    def finish(self) -> None:
        """Wait until every committed byte is in its segment. Raises what went wrong with a copy."""

    def close(self) -> None:
        """Free staging and let go of segment memory, after success or failure; idempotent. No landing is open then."""


def elements(copy: Copy, source: memoryview) -> torch.Tensor:
    """What one copy moves, [rows, run]: elements of the file's dtype if it casts, else bytes. `source`: its span."""
    import torch

    dtype = getattr(torch, copy.source_dtype) if copy.casts else torch.uint8
    # Elements may start at any byte of a file; a bytearray is aligned for every dtype.
    flat = torch.frombuffer(bytearray(source), dtype=dtype)
    return flat.as_strided((copy.rows, copy.run // dtype.itemsize), (copy.pitch // dtype.itemsize, 1))


def open_sink(backend: Backend, segments: Sequence[WritableSegment]) -> Sink:
    """The sink that fills segments of this backend. The segments stay the caller's."""
    if backend.name is BackendName.HOST:
        from wcache.weights.sink_host import HostSink

        return HostSink(segments)
    from wcache.weights.sink_cuda import CudaSink

    return CudaSink(backend, segments)
