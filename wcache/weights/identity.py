# SPDX-License-Identifier: Apache-2.0
"""The identity of a checkpoint: SHA-256 over the bytes of exactly the files that count, and how to know it for free.

`recognise` opens no checkpoint file: digest store first, then the names of hub cache blobs. `identify` hashes the rest,
several files at once. File names, directory and times are no part of an identity; a moved stamp means that a file is
hashed again, never a miss. Runs in the daemon (`recognise`), the loader child, the CLI and engines; imports no torch.
Surprising: a store into a shared mapping moves a file's times only at the first write to each clean page, so dirty
pages are written back before hashing; and on tmpfs it never does, so nothing there is recognised by its stamp.
FUSE mounts hand out inode numbers as they like, so there a stamp counts only together with the path.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from wcache.errors import CheckpointError, FingerprintError
from wcache.host.statx import fresh_stat
from wcache.model import CheckpointFault, IdentityPolicy
from wcache.weights.checkpoint import PARALLEL_CALLS, Survey
from wcache.weights.checkpoint_file import CheckpointFile, Stamp, moved, write_back
from wcache.weights.digests import FILE_NAME, Claim, DigestStore
from wcache.weights.directory import open_regular
from wcache.weights.fingerprint import digest
from wcache.weights.header import describe

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20
WAIT_S = 600.0  # for another process that hashes the same file; it is taken over at once if that process dies
TRIES = 3  # a link made to a file moves its ctime, once; a file that keeps changing is refused

# Stores into a mapping of these leave no trace in stat(2): they have no pages to write back.
_UNTRACKED = {"tmpfs", "ramfs", "hugetlbfs"}

Progress = Callable[[int, int], None]  # bytes hashed so far, bytes to hash; from any thread, one call at a time


@dataclass(frozen=True, slots=True)
class Identity:
    """`content`: hex SHA-256 for the whole checkpoint; None while files are `unknown` (their names).

    `source`: how the files were known, strongest first: hashed, store, stat, blob. `digests`: by file name.
    `claimed`: files known by their hub cache name alone; hashing them while they are loaded costs no second read.
    `refuted`: files whose bytes are not what the store or the hub cache's name said (`deep` only).
    """

    content: str | None
    source: str
    digests: dict[str, str]
    unknown: tuple[str, ...]
    policy: IdentityPolicy
    claimed: tuple[str, ...] = ()
    refuted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hashed:
    """A file's digest, the stamp it had before and after, and time.time() before the first byte was read."""

    sha256: str
    stamp: Stamp
    started: float


def open_store(state_dir: Path) -> DigestStore:
    """The digest store of this host (or user). Never raises; see DigestStore."""
    return DigestStore(state_dir / FILE_NAME)


def combine(survey: Survey, digests: Mapping[str, str]) -> str:
    """The content identity: which bytes there are, which tensors each file is there for, and what decides their use.

    Raises FingerprintError if a file's digest is missing.
    """
    missing = [f.name for f in survey.files if f.name not in digests]
    if missing:
        raise FingerprintError(f"{survey.directory}: no digest of {describe(missing)}")
    assigned: dict[str, list[str]] = {}
    for tensor, file in (survey.weight_map or {}).items():
        assigned.setdefault(file, []).append(tensor)
    named = survey.weight_map is not None
    files = [[digests[f.name], sorted(assigned.get(f.name, ())) if named else None] for f in survey.files]
    files.sort(key=lambda entry: (entry[0], entry[1] or []))
    return digest({"version": 1, "files": files, "configuration": survey.config_digests})


def stamps_id(survey: Survey) -> str:
    """Hex SHA-256 over the files' stamps on this host: finds who is loading the same files now, never a hit."""
    stamps = [[f.stamp.device, f.stamp.inode, f.stamp.size, f.stamp.mtime_ns, f.stamp.ctime_ns] for f in survey.files]
    return digest({"stamps": stamps, "configuration": survey.config_digests})


def recognise(survey: Survey, store: DigestStore, policy: IdentityPolicy) -> Identity:
    """What is known without opening a checkpoint file. `content` is None if some file is not known."""
    return _identity(survey, policy, _recognise(survey.files, store, policy))


def identify(
    survey: Survey,
    store: DigestStore,
    policy: IdentityPolicy,
    *,
    deep: bool = False,
    by_name: bool = True,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Identity:
    """As `recognise`, and hashes what is unknown: `content` is never None. `deep` hashes everything, believing nothing.

    `by_name` false: the names in a hub's cache are not believed, as for whoever publishes what it loads. One thread per
    core by default; several processes that identify the same files share the work.
    Raises CheckpointError: unreadable, or changed while it was read.
    """
    known = _recognise(survey.files, store, policy, by_name=by_name)
    todo = [f for f in survey.files if deep or f.name not in known]
    if not todo:
        return _identity(survey, policy, known)
    total = sum(f.stamp.size for f in todo)
    log.info("hashing %d of %d files of %s (%.1f GB)", len(todo), len(survey.files), survey.directory, total / 1e9)
    hashed = _hash_all(todo, store, deep, _Meter(total, progress), threads)
    refuted = [n for n, (sha256, _) in known.items() if n in hashed and hashed[n] != sha256]
    if refuted:
        log.warning("%s: bytes are not what their name or the digest store says: %s", survey.directory, refuted)
    found = {**known, **{name: (sha256, "hashed") for name, sha256 in hashed.items()}}
    return _identity(survey, policy, found, tuple(refuted))


def digests_of(paths: Mapping[str, Path], store: DigestStore) -> dict[str, str]:
    """SHA-256 of any files, by the names given to them; those whose stamps the store knows are not read.

    Raises OSError, CheckpointError.
    """
    files = [CheckpointFile(name, path, Stamp.of(fresh_stat(path)), None) for name, path in paths.items()]
    known = {name: sha256 for name, (sha256, _) in _recognise(files, store, IdentityPolicy.CONTENT).items()}
    todo = [f for f in files if f.name not in known]
    total = sum(f.stamp.size for f in todo)
    return known | (_hash_all(todo, store, False, _Meter(total, None), None) if todo else {})


def remember(survey: Survey, digests: Mapping[str, str], store: DigestStore, started: float) -> None:
    """Record digests that were computed while loading; `started`: time.time() before the first byte was read.

    Raises CheckpointError(CHANGED_WHILE_READING) if a file is no longer what was surveyed: its digest, and whatever
    was loaded from it, must not be used.
    """
    files = [f for f in survey.files if f.name in digests]
    if not files:
        return
    stamps = unmoved(survey, files)
    store.record_all((stamp, digests[f.name], started, _real(f)) for f, stamp in zip(files, stamps, strict=True))


def unmoved(survey: Survey, files: Sequence[CheckpointFile]) -> list[Stamp]:
    """The stamps that files of a survey have now. Raises CheckpointError(CHANGED_WHILE_READING) if they are others."""
    with ThreadPoolExecutor(max(1, min(PARALLEL_CALLS, len(files))), "wcache-stat") as pool:
        stamps = list(pool.map(_stamp_now, files))
    changed = [f.name for f, stamp in zip(files, stamps, strict=True) if not f.stamp.unmoved(stamp)]
    if changed:
        raise moved(f"{survey.directory}: changed while loading: {describe(changed)}")
    return stamps


def hash_file(file: CheckpointFile, buffer: memoryview, advance: Callable[[int], None] = lambda _: None) -> Hashed:
    """Read a file once from end to end. Raises CheckpointError if it changes meanwhile, or since it was surveyed."""
    with open_regular(file.path, file.name) as fd:
        for _ in range(TRIES):
            seen = Stamp.of(fresh_stat(fd.fileno()))
            if (seen.size, seen.mtime_ns) != (file.stamp.size, file.stamp.mtime_ns):
                break
            write_back(fd.fileno())
            started = time.time()
            # A store between the write-back of its page and here would leave a dirty page; it has moved the stamp.
            if not seen.unmoved(Stamp.of(fresh_stat(fd.fileno()))):
                continue
            sha256 = _hash(fd.fileno(), seen.size, buffer, advance, file.name)
            if seen.unmoved(Stamp.of(fresh_stat(fd.fileno()))):
                return Hashed(sha256, seen, started)
            advance(-seen.size)
    raise moved(f"{file.path}: changed while it was read")


def _recognise(
    files: Iterable[CheckpointFile], store: DigestStore, policy: IdentityPolicy, *, by_name: bool = True
) -> dict[str, tuple[str, str]]:
    """File name to (digest, how it is known)."""
    found: dict[str, tuple[str, str]] = {}
    mounts = _Mounts()
    by_path = policy is not IdentityPolicy.CONTENT
    for file in files:
        tracked = file.stamp.device not in mounts.untracked
        if tracked and (sha256 := store.lookup(file.stamp, mounts.path(file))):
            found[file.name] = sha256, "store"
        elif by_path and (sha256 := store.lookup_path(_real(file), file.stamp.size, file.stamp.mtime_ns)):
            found[file.name] = sha256, "stat"
        elif by_name and tracked and file.blob and store.accept_claim(file.stamp, file.blob):
            found[file.name] = file.blob, "blob"
    return found


def _identity(
    survey: Survey, policy: IdentityPolicy, found: Mapping[str, tuple[str, str]], refuted: tuple[str, ...] = ()
) -> Identity:
    digests = {name: sha256 for name, (sha256, _) in found.items()}
    ways = {way for _, way in found.values()}
    return Identity(
        content=combine(survey, digests) if len(digests) == len(survey.files) else None,
        source="+".join(way for way in ("hashed", "store", "stat", "blob") if way in ways),
        digests=digests,
        unknown=tuple(f.name for f in survey.files if f.name not in digests),
        policy=policy,
        claimed=tuple(name for name, (_, way) in found.items() if way == "blob"),
        refuted=refuted,
    )


class _Meter:
    """Counts bytes from several threads; `stop` ends them early when one has failed."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._total = total
        self._done = 0
        self._progress = progress
        self.stop = threading.Event()

    def advance(self, count: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


class _Stopped(Exception):
    """Another file has failed; this one need not be finished."""


def _hash_all(
    files: Iterable[CheckpointFile], store: DigestStore, deep: bool, meter: _Meter, threads: int | None
) -> dict[str, str]:
    """Largest first, so that no thread is left alone with a large file at the end.

    Files that another process is hashing come last: by then they are done, or that process is not.
    """
    ordered = sorted(files, key=lambda f: f.stamp.size, reverse=True)
    mounts = _Mounts()
    shared = {f.name: mounts.path(f) for f in ordered if not deep and f.stamp.device not in mounts.untracked}
    local = threading.local()
    digests: dict[str, str] = {}

    def work(file: CheckpointFile, wait_s: float) -> tuple[CheckpointFile, str | None]:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(min(BUFFER_BYTES, ordered[0].stamp.size or 1)))
        if file.name not in shared:
            return file, _hash_and_record(file, store, local.buffer, meter)
        return file, _hash_shared(file, shared[file.name], store, local.buffer, meter, wait_s)

    threads = threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(threads, len(ordered))), "wcache-hash") as pool:
        try:
            for wait_s in (0.0, WAIT_S):
                futures = [pool.submit(work, file, wait_s) for file in ordered if file.name not in digests]
                _collect(futures, digests)
        except BaseException:
            meter.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return digests


def _collect(futures: list[Future[tuple[CheckpointFile, str | None]]], digests: dict[str, str]) -> None:
    for future in as_completed(futures):
        file, sha256 = future.result()
        if sha256 is not None:
            digests[file.name] = sha256


def _hash_shared(
    file: CheckpointFile, path: str | None, store: DigestStore, buffer: memoryview, meter: _Meter, wait_s: float
) -> str | None:
    """The digest, from this process or another; None if another one is at it and `wait_s` is 0."""
    answer = store.wait(file.stamp, wait_s, path)
    if isinstance(answer, str):
        meter.advance(file.stamp.size)
        return answer
    if answer is None and not wait_s:
        return None
    with answer or Claim(None):
        return _hash_and_record(file, store, buffer, meter)


def _hash_and_record(file: CheckpointFile, store: DigestStore, buffer: memoryview, meter: _Meter) -> str:
    hashed = hash_file(file, buffer, meter.advance)
    store.record(hashed.stamp, hashed.sha256, hashed.started, _real(file))
    return hashed.sha256


def _hash(fd: int, size: int, buffer: memoryview, advance: Callable[[int], None], name: str) -> str:
    """SHA-256 of the first `size` bytes; hashlib and preadv let go of the interpreter lock."""
    state = hashlib.sha256()
    offset = 0
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while offset < size:
            # The kernel reads the next piece while this one is hashed.
            os.posix_fadvise(fd, offset + len(buffer), len(buffer), os.POSIX_FADV_WILLNEED)
            count = os.preadv(fd, [buffer], offset)
            if count == 0:
                break
            state.update(buffer[:count])
            offset += count
            advance(count)
    except OSError as e:
        raise CheckpointError(CheckpointFault.UNREADABLE, f"read {name} at byte {offset}: {e.strerror}") from e
    return state.hexdigest()


def _stamp_now(file: CheckpointFile) -> Stamp:
    try:
        return Stamp.of(fresh_stat(file.path))
    except OSError as e:
        message = f"{file.path}: gone while it was loaded: {e.strerror}"
        raise CheckpointError(CheckpointFault.CHANGED_WHILE_READING, message) from e


def _real(file: CheckpointFile) -> str:
    return os.path.realpath(file.path)


class _Mounts:
    """Devices on which a stamp says less than elsewhere (proc_pid_mountinfo(5)).

    `untracked`: bytes may change without moving a stamp. `renumbered`: an inode number may stand for another file
    after a remount, and object stores give the files of one upload the same size and second.
    """

    def __init__(self) -> None:
        self.untracked: set[int] = set()
        self.renumbered: set[int] = set()
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            fields, _, rest = line.partition(" - ")
            kind = rest.split(" ", 1)[0]
            major, minor = fields.split(" ", 3)[2].split(":")
            if kind in _UNTRACKED:
                self.untracked.add(os.makedev(int(major), int(minor)))
            elif kind == "fuse" or kind.startswith("fuse."):
                self.renumbered.add(os.makedev(int(major), int(minor)))

    def path(self, file: CheckpointFile) -> str | None:
        """The path that must agree as well, where that is needed."""
        return _real(file) if file.stamp.device in self.renumbered else None
