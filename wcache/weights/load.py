# SPDX-License-Identifier: Apache-2.0
"""Fill segments with one rank's shard: plan the memory, cut files into chunks, read them into a sink, digest.

Runs in the loader child. Everything is planned before the first allocation; peak memory is the segments plus
STAGING_BYTES at most. Whoever calls `load` owns the `Filled` it returns and closes or seals it; a load that fails
leaves nothing behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from wcache.errors import OutOfMemory
from wcache.host.fds import OwnedFd, owning
from wcache.model import Kind
from wcache.weights.checkpoint import Checkpoint
from wcache.weights.chunks import chunks
from wcache.weights.layout import Packing, pack
from wcache.weights.manifest import SegmentSpec, StorageSpec, TensorSpec, contiguous_stride
from wcache.weights.reader import THREADS, Job, Progress, Tally, read
from wcache.weights.segment import Backend, WritableSegment
from wcache.weights.sharding import ShardPlan
from wcache.weights.sink import Copy, open_sink

__all__ = ["Filled", "Progress", "load"]


@dataclass(slots=True)
class Filled:
    """A shard in memory that is not published yet. `digests`: SHA-256 by name of each file that was to be hashed.

    `tally`: what reading it took, for tests and benchmarks.
    """

    segments: list[WritableSegment]
    specs: tuple[SegmentSpec, ...]
    storages: tuple[StorageSpec, ...]
    tensors: tuple[TensorSpec, ...]
    digests: dict[str, str]
    tally: Tally

    def seal(self) -> list[OwnedFd]:
        """Make every segment immutable and give its fd away, in order. If one fails all are freed."""
        fds: list[OwnedFd] = []
        try:
            with owning(fds):
                for segment in self.segments:
                    fds.append(segment.seal())
        finally:
            self.close()
        return fds

    def close(self) -> None:
        """Free what was not sealed."""
        with ExitStack() as stack:
            for segment in self.segments:
                stack.callback(segment.close)
            self.segments = []


def load(
    checkpoint: Checkpoint,
    shard_plan: ShardPlan,
    backend: Backend,
    *,
    hash_files: Collection[str] = (),
    progress: Progress | None = None,
    threads: int | None = None,
    keep_page_cache: bool = True,
) -> Filled:
    """Read a shard into new segments of `backend`.

    `threads`: at most THREADS, which is the default. Raises OutOfMemory before anything is allocated if the shard does
    not fit, SegmentError, and CheckpointError: TRUNCATED, CHANGED_WHILE_READING, UNREADABLE.
    """
    packing = pack([t.nbytes for t in shard_plan.tensors], backend.granularity)
    _check_memory(packing, backend)
    jobs = _jobs(checkpoint, shard_plan, packing, frozenset(hash_files))
    count = THREADS if threads is None else threads
    with ExitStack() as unwind:
        segments = []
        for i, size in enumerate(packing.segments):
            segments.append(backend.create(f"segment-{i}", size))
            unwind.callback(segments[-1].close)
        sink = open_sink(backend, segments)
        try:
            tally = read(jobs, sink, threads=count, progress=progress, keep_page_cache=keep_page_cache)
            sink.finish()
        finally:
            sink.close()
        specs = _digest(segments, count)
        unwind.pop_all()
    places = zip(packing.places, shard_plan.tensors, strict=True)
    return Filled(
        segments=segments,
        specs=specs,
        storages=tuple(StorageSpec(segment, offset, t.nbytes) for (segment, offset), t in places),
        tensors=tuple(
            TensorSpec(t.names, Kind.PARAMETER, t.dtype, t.shape, contiguous_stride(t.shape), i)
            for i, t in enumerate(shard_plan.tensors)
        ),
        digests={job.file.name: job.hasher.hexdigest() for job in jobs if job.hasher is not None},
        tally=tally,
    )


def _check_memory(packing: Packing, backend: Backend) -> None:
    needed, free = packing.aligned_bytes, backend.available()
    if needed > free:
        raise OutOfMemory(f"the shard needs {needed} bytes on {backend.device}: {backend.usage()}")


def _digest(segments: Sequence[WritableSegment], threads: int) -> tuple[SegmentSpec, ...]:
    with ThreadPoolExecutor(max(1, threads), "wcache-digest") as pool:
        digests = list(pool.map(lambda segment: segment.digest(), segments))
    return tuple(SegmentSpec(s.size, s.aligned_size, d) for s, d in zip(segments, digests, strict=True))


def _jobs(checkpoint: Checkpoint, shard_plan: ShardPlan, packing: Packing, hash_files: frozenset[str]) -> list[Job]:
    """Files with something to read. Raises ValueError for a name in `hash_files` that the checkpoint does not have."""
    files = checkpoint.survey.files
    if unknown := hash_files - {f.name for f in files}:
        raise ValueError(f"{sorted(unknown)} are no files of the checkpoint")
    copies: list[list[Copy]] = [[] for _ in files]
    for (segment, offset), tensor in zip(packing.places, shard_plan.tensors, strict=True):
        for p in tensor.pieces:
            copies[p.file].append(
                Copy(
                    start=p.offset,
                    rows=p.rows,
                    run=p.run,
                    pitch=p.pitch,
                    segment=segment,
                    target=offset + p.target,
                    target_pitch=p.target_pitch,
                    source_dtype=p.source_dtype,
                    dtype=tensor.dtype,
                )
            )
    jobs = []
    for file, wanted in zip(files, copies, strict=True):
        hashed = file.name in hash_files
        cut = chunks(wanted, file.stamp.size if hashed else None)
        if cut or hashed:
            jobs.append(Job(file, cut, hashlib.sha256() if hashed else None, left=len(cut)))
    return jobs
