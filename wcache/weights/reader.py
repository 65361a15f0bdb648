# SPDX-License-Identifier: Apache-2.0
"""Read checkpoint files, chunk by chunk, into what a sink hands out; hash those that must be hashed as they pass.

Runs in the loader child, with threads of its own that end before `read` returns. A file that is hashed is read whole,
in order, by one thread, and its next chunk is read while the one before it is hashed; of other files several threads
read different chunks. A file that moves while it is read is an error. Owns the open files, never segment memory.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from wcache.errors import CheckpointError
from wcache.host.fds import OwnedFd, close_all
from wcache.model import CheckpointFault
from wcache.weights.checkpoint_file import CheckpointFile, check_unmoved, open_surveyed
from wcache.weights.sink import CHUNK_BYTES, LANDINGS_PER_THREAD, STAGING_BYTES, Chunk, Landing, Sink

THREADS = STAGING_BYTES // CHUNK_BYTES // LANDINGS_PER_THREAD  # more could wait for each other's staging
PROGRESS_INTERVAL_S = 0.1
MAX_BUFFERS = os.sysconf("SC_IOV_MAX")  # buffers a preadv(2) takes


class Progress(Protocol):
    """Told at most every PROGRESS_INTERVAL_S, from the thread that called `read`. What it raises ends the reading."""

    def __call__(self, *, bytes_done: int, bytes_total: int, files_done: int, files_total: int) -> None: ...


class Hash(Protocol):
    """What hashlib's objects do."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class Job:
    """One file to read, by several threads at once unless it is hashed."""

    file: CheckpointFile
    chunks: list[Chunk]
    hasher: Hash | None
    fd: OwnedFd | None = None
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Tally:
    """What reading took. `reads`: system calls."""

    bytes_read: int
    reads: int


def read(
    jobs: Sequence[Job], sink: Sink, *, threads: int, progress: Progress | None = None, keep_page_cache: bool = True
) -> Tally:
    """Read every chunk of every job. Raises CheckpointError: TRUNCATED, CHANGED_WHILE_READING, UNREADABLE.

    On the first failure the other threads stop after the chunk in hand; no landing stays open and no file.
    """
    reader = _Reader(jobs, keep_page_cache)
    try:
        _run(reader, sink, max(1, min(threads, THREADS)), progress)
    finally:
        reader.close()
    return Tally(reader.bytes_done, reader.reads)


def _run(reader: _Reader, sink: Sink, threads: int, progress: Progress | None) -> None:
    with ThreadPoolExecutor(threads, "wcache-hash") as hashers, ThreadPoolExecutor(threads, "wcache-read") as readers:
        working = {readers.submit(reader.work, sink, hashers) for _ in range(threads)}
        try:
            while working:
                done, working = wait(working, timeout=PROGRESS_INTERVAL_S)
                for worker in done:
                    worker.result()
                if progress is not None:
                    reader.report(progress)
        except BaseException:
            reader.stop()
            raise


class _Reader:
    """Hands out chunks to threads and reads them. Owns the open files."""

    def __init__(self, jobs: Sequence[Job], keep_page_cache: bool) -> None:
        self._jobs = jobs
        self._keep_page_cache = keep_page_cache
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        # Files that are hashed take longest: they go first.
        order = sorted(jobs, key=lambda job: job.hasher is None)
        self._tasks: deque[tuple[Job, Chunk | None]] = deque()
        for job in order:
            parts: Sequence[Chunk | None] = job.chunks if job.hasher is None else [None]
            self._tasks.extend((job, part) for part in parts)
        self.bytes_total = sum(chunk.size for job in jobs for chunk in job.chunks)
        self.bytes_done = self.files_done = self.reads = 0

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        close_all(job.fd for job in self._jobs if job.fd is not None)

    def report(self, progress: Progress) -> None:
        with self._lock:
            done, files = self.bytes_done, self.files_done
        progress(bytes_done=done, bytes_total=self.bytes_total, files_done=files, files_total=len(self._jobs))

    def work(self, sink: Sink, hashers: ThreadPoolExecutor) -> None:
        """One thread's life."""
        try:
            while not self._stopped.is_set():
                try:
                    job, chunk = self._tasks.popleft()
                except IndexError:
                    return
                if chunk is not None:
                    self._commit(job, chunk, self._fill(job, chunk, sink))
                elif job.hasher is not None:
                    self._read_whole(job, job.hasher, sink, hashers)
        except BaseException:
            self.stop()
            raise

    def _read_whole(self, job: Job, hasher: Hash, sink: Sink, hashers: ThreadPoolExecutor) -> None:
        """Read, hash and commit in order; the next chunk is read while the one before it is hashed."""
        landings: deque[tuple[Chunk, Landing]] = deque()
        hashing: Future[None] | None = None
        try:
            for chunk in job.chunks:
                if self._stopped.is_set():
                    return
                landings.append((chunk, self._fill(job, chunk, sink)))
                if hashing is not None:
                    hashing.result()
                    self._commit(job, *landings.popleft())
                hashing = hashers.submit(_hash, hasher, landings[-1][1])
            if hashing is not None:
                hashing.result()
                self._commit(job, *landings.popleft())
        finally:
            if hashing is not None:
                wait([hashing])
            for _, landing in landings:
                landing.abandon()

    def _fill(self, job: Job, chunk: Chunk, sink: Sink) -> Landing:
        """Read one chunk into a landing, which is then the caller's to commit."""
        fd = _open(job)
        landing = sink.land(chunk)
        try:
            calls = _read(fd, job.file.name, chunk, landing.buffers)
        except BaseException:
            landing.abandon()
            raise
        with self._lock:
            self.reads += calls
        return landing

    def _commit(self, job: Job, chunk: Chunk, landing: Landing) -> None:
        landing.commit()
        with self._lock:
            self.bytes_done += chunk.size
            job.left -= 1
            last = job.left == 0
        if last:
            self._end(job)

    def _end(self, job: Job) -> None:
        """A file is read: did it hold still?"""
        fd, job.fd = job.fd, None
        if fd is None:
            raise ValueError(f"{job.file.name} is not open")
        with fd:
            check_unmoved(job.file, fd, "while it was read")
            if not self._keep_page_cache:
                os.posix_fadvise(fd.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.files_done += 1


def _open(job: Job) -> int:
    """The file's descriptor, opened by the first thread that needs it. Raises CheckpointError."""
    with job.lock:
        if job.fd is None:
            job.fd = open_surveyed(job.file, hashed=job.hasher is not None)
            os.posix_fadvise(job.fd.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return job.fd.fileno()


def _read(fd: int, name: str, chunk: Chunk, buffers: Sequence[memoryview]) -> int:
    """Fill `buffers` from the chunk's offset on; the number of system calls. Raises CheckpointError."""
    calls, done, first, skip = 0, 0, 0, 0
    while done < chunk.size:
        batch = [buffers[first][skip:], *buffers[first + 1 : first + MAX_BUFFERS]]
        try:
            count = os.preadv(fd, batch, chunk.offset + done)
        except OSError as e:
            where = f"read {chunk.size - done} bytes at {chunk.offset + done} of {name}"
            raise CheckpointError(CheckpointFault.UNREADABLE, f"{where}: {e.strerror}") from e
        finally:
            batch[0].release()
        calls += 1
        if count == 0:
            raise CheckpointError(
                CheckpointFault.TRUNCATED,
                f"{name} ended at byte {chunk.offset + done}, {chunk.size - done} bytes too early",
            )
        done += count
        skip += count
        while first < len(buffers) and skip >= len(buffers[first]):
            skip -= len(buffers[first])
            first += 1
    return calls


def _hash(hasher: Hash, landing: Landing) -> None:
    for buffer in landing.buffers:
        hasher.update(buffer)
