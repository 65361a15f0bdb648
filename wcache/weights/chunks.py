# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint file is read: which contiguous pieces, and what of each goes where.

Pure arithmetic. What a rank wants of a file is cut and joined into chunks of up to CHUNK_BYTES, so that 3000 small
tensors do not become 3000 reads. Strided runs (row-parallel weights) are read with what lies between them, unless the
runs are long: rows of a few KiB, one read each, would be a round trip each on network storage.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from wcache.model import DTYPE_BITS
from wcache.weights.sink import CHUNK_BYTES, Chunk, Copy

LONG_RUN_BYTES = 1 << 20  # strided runs of this length are read one by one
PAGE_BYTES = 4096  # a smaller gap costs no page more: it is always read along
GAP_SHARE = 32  # larger gaps are read along, smallest first, up to 1/32 of what is wanted


def chunks(copies: Iterable[Copy], whole: int | None = None) -> list[Chunk]:
    """Chunks of one file, in order. `copies`: `start` counts from the file's first byte; spans do not overlap.

    `whole`: the file's size, if every byte of it must be read in order (it is hashed).
    """
    runs = sorted((run for copy in copies for run in _simplify(copy)), key=lambda c: c.start)
    builder = _Builder(_gap_limit(runs) if whole is None else None)
    for run in runs:
        builder.add(run)
    return builder.finish(whole)


def _simplify(copy: Copy) -> Iterator[Copy]:
    """Dense rows become one run, long rows a run each; short rows stay together."""
    item, source_item = DTYPE_BITS[copy.dtype] // 8, DTYPE_BITS[copy.source_dtype] // 8
    target_run = copy.run // source_item * item
    if copy.rows == 1 or (copy.run == copy.pitch and copy.target_pitch == target_run):
        total = copy.rows * copy.run
        yield replace(copy, rows=1, run=total, pitch=total, target_pitch=total // source_item * item)
    elif copy.run >= LONG_RUN_BYTES or copy.pitch > CHUNK_BYTES // 2:
        for row in range(copy.rows):
            start, target = copy.start + row * copy.pitch, copy.target + row * copy.target_pitch
            yield replace(copy, start=start, rows=1, pitch=copy.run, target=target, target_pitch=target_run)
    else:
        yield copy


def _gap_limit(runs: Sequence[Copy]) -> int:
    """Gaps up to this many bytes are read along: as large as the share allows if all gaps of that size are."""
    budget = sum(run.span for run in runs) // GAP_SHARE
    gaps = Counter(b.start - a.start - a.span for a, b in itertools.pairwise(runs))
    limit = PAGE_BYTES
    for gap, times in sorted(gaps.items()):
        budget -= gap * times if gap > PAGE_BYTES else 0
        if budget < 0 or gap >= CHUNK_BYTES:
            break
        limit = max(limit, gap)
    return limit


class _Builder:
    """Fills one chunk after the other; a run that does not fit is cut at an element or between two rows.

    `gap_limit` None: every byte of the file is read, from its first on.
    """

    def __init__(self, gap_limit: int | None) -> None:
        self._gap_limit = gap_limit
        self._start = self._end = 0  # of the open chunk, so far
        self._copies: list[Copy] = []
        self._done: list[Chunk] = []

    def add(self, run: Copy) -> None:
        rest: Copy | None = run
        while rest is not None:
            if self._gap_limit is not None and rest.start - self._end > self._gap_limit:
                self._begin(rest.start)
            head, tail = _split(rest, self._start + CHUNK_BYTES - rest.start)
            if head is None:
                self._begin(rest.start)
                continue
            self._copies.append(replace(head, start=head.start - self._start))
            self._end, rest = head.start + head.span, tail

    def finish(self, whole: int | None) -> list[Chunk]:
        while whole is not None and self._start < whole:
            self._begin(whole)
        self._begin(self._end)
        return self._done

    def _begin(self, start: int) -> None:
        """End the open chunk and open one at `start`, or where the open one is full if every byte is read."""
        end = self._end
        if self._gap_limit is None:
            start = end = min(start, self._start + CHUNK_BYTES)
        if self._copies or (end > self._start and self._gap_limit is None):
            self._done.append(Chunk(self._start, end - self._start, tuple(self._copies)))
        self._start = self._end = start
        self._copies = []


def _split(copy: Copy, room: int) -> tuple[Copy | None, Copy | None]:
    """The part of a copy that fits into `room` bytes, and the rest."""
    if copy.span <= room:
        return copy, None
    if copy.rows == 1:
        source_item, item = DTYPE_BITS[copy.source_dtype] // 8, DTYPE_BITS[copy.dtype] // 8
        elements = max(room, 0) // source_item
        if elements == 0:
            return None, copy
        fits, taken = elements * source_item, elements * item
        head = replace(copy, run=fits, pitch=fits, target_pitch=taken)
        run, target_run = copy.run - fits, copy.target_pitch - taken
        start, target = copy.start + fits, copy.target + taken
        return head, replace(copy, start=start, run=run, pitch=run, target=target, target_pitch=target_run)
    rows = (room - copy.run) // copy.pitch + 1 if room >= copy.run else 0
    if rows == 0:
        return None, copy
    start, target = copy.start + rows * copy.pitch, copy.target + rows * copy.target_pitch
    return replace(copy, rows=rows), replace(copy, start=start, rows=copy.rows - rows, target=target)
