# SPDX-License-Identifier: Apache-2.0
"""Where storages lie in segments, planned before the first allocation.

Pure arithmetic; used by the loader child and by engines that publish. Large storages come first, in their order, then
the small ones: large weights are mostly multiples of the backend's granularity, and norms between them would cost every
segment a padded end. Every segment is exactly as long as what it holds: what is lost is the padding to ALIGNMENT before
a storage and the padding to the granularity behind a segment.
Two neighbouring segments hold more than the limit together, so there are fewer than two per `limit` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wcache.weights.manifest import ALIGNMENT
from wcache.weights.segment import SEGMENT_BYTES

SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Packing:
    """`segments`: bytes in use of each. `places`: (segment, offset) of each storage, in the order they were given.

    An empty storage lies at (0, 0) and takes no memory, even where there is no segment at all.
    """

    segments: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    granularity: int

    @property
    def aligned_bytes(self) -> int:
        """Memory that all segments take (bytes)."""
        return sum(align(size, self.granularity) for size in self.segments)


def align(value: int, to: int) -> int:
    return -(-value // to) * to


def pack(sizes: Sequence[int], granularity: int, limit: int = SEGMENT_BYTES) -> Packing:
    """Lay storages of `sizes` bytes into segments of at most `limit` bytes; a larger storage gets one of its own.

    O(n log n). Raises ValueError for a negative size.
    """
    segments: list[int] = []
    places = [(0, 0)] * len(sizes)
    current = -1  # the segment being filled; a storage beyond the limit does not end it
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i] < SMALL_BYTES):
        size = sizes[i]
        if size < 0:
            raise ValueError(f"a storage of {size} bytes")
        if size == 0:
            continue
        if size > limit:
            places[i] = (len(segments), 0)
            segments.append(size)
            continue
        offset = align(segments[current], ALIGNMENT) if current >= 0 else 0
        if current < 0 or offset + size > limit:
            current, offset = len(segments), 0
            segments.append(0)
        segments[current] = offset + size
        places[i] = (current, offset)
    return Packing(tuple(segments), tuple(places), granularity)
