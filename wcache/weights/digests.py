# SPDX-License-Identifier: Apache-2.0
"""The digest store: SHA-256 of checkpoint files by stamp, so that what did not change is not read again.

SQLite in the state directory, used by daemons, loaders, engines and the CLI of a host at once. It saves hashing and
nothing else: whatever is wrong with it (corrupt, foreign, locked, gone, not writable), the answer is "unknown" and the
file is hashed. A rollback journal, not WAL: readers of another uid need no write access. Every row carries a checksum
of its own, so that no damage to the file turns into a wrong digest.

A stamp is trusted only if it had settled when hashing began (git calls the others "racily clean"): a later write in
the same tick of the file system's clock would not move it. Wall clocks jump, so nothing is compared with "now"; and a
stamp from the future counts as settled: a later write can wear it only if the clock passes that very tick once more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from wcache.host.flock import FileLock
from wcache.weights.checkpoint_file import Stamp

log = logging.getLogger(__name__)

FILE_NAME = "digests.sqlite"
BUSY_TIMEOUT_S = 5.0
FINE_MARGIN_NS = 100_000_000  # a kernel tick is at most 10 ms
COARSE_MARGIN_NS = 2_000_000_000  # FAT counts in 2 s, older network file systems in 1 s
STAT_TOLERANCE_NS = 1_000_000  # mounts have been seen to round times
POLL_S = 0.05

_APPLICATION_ID = 0x77636163  # "wcac"
_VERSION = 1
_DIGESTS = (
    "file TEXT PRIMARY KEY, stamp TEXT, sha256 TEXT, started_ns INTEGER, claimed INTEGER, path TEXT, checksum TEXT"
)
_PATHS = "path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, sha256 TEXT, started_ns INTEGER, checksum TEXT"
_SCHEMA = [f"CREATE TABLE digests ({_DIGESTS}) WITHOUT ROWID", f"CREATE TABLE paths ({_PATHS}) WITHOUT ROWID"]

_PUT_DIGEST = "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?, ?)"
_PUT_PATH = "INSERT OR REPLACE INTO paths VALUES (?, ?, ?, ?, ?, ?)"

T = TypeVar("T")


class _Row(NamedTuple):
    stamp: str
    sha256: str
    started_ns: int
    claimed: bool
    path: str


class DigestStore:
    """What is known about files. Safe for threads and processes; never raises for a fault of the store itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._complained: set[str] = set()
        self._reopen()

    def lookup(self, stamp: Stamp, path: str | None = None) -> str | None:
        """The digest of the bytes that this stamp stands for, if they were hashed once and the stamp had settled.

        `path`: it must also have been hashed under this real path; for file systems that hand out inode numbers anew.
        """
        row = self._row(stamp)
        if row is None or row.stamp != _stamp(stamp) or row.claimed or not settled(stamp, row.started_ns):
            return None
        return row.sha256 if path is None or path == row.path else None

    def record(self, stamp: Stamp, sha256: str, started: float, path: str = "") -> None:
        """Remember a digest. `stamp` is the same before and after hashing; `started`: time.time() before it began."""
        self.record_all([(stamp, sha256, started, path)])

    def record_all(self, digests: Iterable[tuple[Stamp, str, float, str]]) -> None:
        """Several digests (stamp, sha256, started, real path) in one transaction, for every policy."""
        rows, by_path = [], []
        for stamp, sha256, started, path in digests:
            started_ns = int(started * 1e9)
            rows.append(_sealed(_file(stamp), _stamp(stamp), sha256, started_ns, 0, path))
            if path:
                by_path.append(_sealed(path, stamp.size, stamp.mtime_ns, sha256, started_ns))
        self._write((_PUT_DIGEST, rows), (_PUT_PATH, by_path))

    def accept_claim(self, stamp: Stamp, sha256: str) -> bool:
        """Whether a hub cache's word for a file's digest stands: yes at first sight, no once the stamp has moved.

        The claim is remembered with its stamp, so that a blob that changes under its name is hashed.
        """
        row = self._row(stamp)
        if row is not None:
            if row.stamp == _stamp(stamp):
                return row.claimed and row.sha256 == sha256
            if not row.claimed or row.sha256 == sha256:
                return False
        self._write((_PUT_DIGEST, [_sealed(_file(stamp), _stamp(stamp), sha256, 0, 1, "")]))
        return True

    def lookup_path(self, path: str, size: int, mtime_ns: int) -> str | None:
        """For the `stat` policy: the digest of what had this real path, size and mtime (within 1 ms)."""
        query = "SELECT size, mtime_ns, sha256, started_ns, checksum FROM paths WHERE path = ?"
        row = self._read(query, (path,))
        if row is None or row != _sealed(path, *row[:-1])[1:]:
            return None
        known_size, known_mtime_ns, sha256, started_ns = row[:-1]
        same = known_size == size and abs(known_mtime_ns - mtime_ns) <= STAT_TOLERANCE_NS
        return cast(str, sha256) if same and not _near(mtime_ns, started_ns) else None

    def claim(self, stamp: Stamp) -> Claim | None:
        """The right to hash this file, so that ranks that load the same files hash each once per host.

        None: another process has it; see `wait`. It ends with the process. Without a usable store everybody gets it.
        """
        name = hashlib.sha256(f"{_file(stamp)} {_stamp(stamp)}".encode()).hexdigest()[:32]
        try:
            lock = FileLock.try_acquire(self.path.parent / "claims" / f"{name}.lock")
        except OSError as e:
            self._complain("claims", "files may be hashed more than once at a time: %s", e)
            return Claim(None)
        return Claim(lock) if lock else None

    def wait(self, stamp: Stamp, timeout_s: float, path: str | None = None) -> str | Claim | None:
        """Wait for another process's digest: the digest, or the claim if that process gave up or died, else None."""
        deadline = time.monotonic() + timeout_s
        while True:
            if known := self.lookup(stamp, path):
                return known
            claim = self.claim(stamp)
            if claim is not None:
                if not (known := self.lookup(stamp, path)):  # recorded between the two calls above
                    return claim
                claim.release()
                return known
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def __enter__(self) -> DigestStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _row(self, stamp: Stamp) -> _Row | None:
        query = "SELECT stamp, sha256, started_ns, claimed, path, checksum FROM digests WHERE file = ?"
        row = self._read(query, (_file(stamp),))
        if row is None or row != _sealed(_file(stamp), *row[:-1])[1:]:
            return None
        return _Row(row[0], row[1], row[2], bool(row[3]), row[4])

    def _read(self, query: str, key: tuple[str]) -> tuple[Any, ...] | None:
        return self._attempt(lambda db: cast(tuple[Any, ...] | None, db.execute(query, key).fetchone()))

    def _write(self, *batches: tuple[str, list[tuple[object, ...]]]) -> None:
        def write(db: sqlite3.Connection) -> None:
            with _transaction(db):
                for statement, rows in batches:
                    db.executemany(statement, rows)

        self._attempt(write)

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run against the store; damage found on the way leads to a new store and a second try."""
        with self._lock:
            for _ in range(2):
                if self._db is None:
                    return None
                try:
                    return work(self._db)
                except (sqlite3.Error, UnicodeDecodeError) as e:
                    if not _is_damage(e):
                        self._complain(str(e), "digest store %s: %s; files may be hashed again", self.path, e)
                        return None
                    self._reopen()
            return None

    def _reopen(self) -> None:
        self.close()
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._db = _open(self.path)
        except _Unusable as e:
            self._rebuild(e)
        except (OSError, sqlite3.Error) as e:
            self._complain("open", "no digest store at %s (%s): files are hashed anew each time", self.path, e)

    def _rebuild(self, reason: Exception) -> None:
        """Move aside what cannot be used and start afresh; under a lock, lest two processes move each other's away."""
        try:
            with FileLock.acquire(self.path.with_suffix(".lock"), BUSY_TIMEOUT_S):
                try:
                    self._db = _open(self.path)
                    return
                except _Unusable:
                    log.warning(
                        "digest store %s is unusable (%s): moved aside, files are hashed anew", self.path, reason
                    )
                # The journal goes first: a hot one would be played back into the new store.
                for suffix in ("-journal", "-wal", "-shm", ""):
                    part = self.path.with_name(self.path.name + suffix)
                    if os.path.lexists(part):
                        part.replace(part.with_name(part.name + ".unusable"))
                self._db = _open(self.path)
        except (OSError, TimeoutError, sqlite3.Error, _Unusable) as e:
            self._complain("rebuild", "digest store %s cannot be replaced (%s): files are hashed anew", self.path, e)

    def _complain(self, kind: str, message: str, *args: object) -> None:
        """Once per kind: a store that does not work is no event per file."""
        if kind not in self._complained:
            self._complained.add(kind)
            log.warning(message, *args)


class Claim:
    """The right to hash one file; released by `release`, at the end of a `with`, or when the process ends."""

    __slots__ = ("_lock",)

    def __init__(self, lock: FileLock | None) -> None:
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def settled(stamp: Stamp, started_ns: int) -> bool:
    """Whether a write after `started_ns` must move the stamp.

    Only ctime counts where the two differ much: mtime can be set at will (utime(2)), ctime cannot.
    """
    if stamp.ctime_ns % 1_000_000 == 0 and stamp.ctime_ns > started_ns:
        return False  # whole seconds ahead of this host's clock: the next write may well fall into the same one
    return not _near(stamp.ctime_ns, started_ns) and not _near(stamp.mtime_ns, started_ns)


def _near(time_ns: int, started_ns: int) -> bool:
    margin = FINE_MARGIN_NS if time_ns % 1_000_000 else COARSE_MARGIN_NS
    return abs(started_ns - time_ns) < margin


class _Unusable(Exception):
    """The file is no store of ours, or must not be believed."""


def _open(path: Path) -> sqlite3.Connection:
    """A checked connection. Raises _Unusable; sqlite3.Error or OSError if there can be no store here."""
    _check_file(path)
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    db.text_factory = lambda raw: raw.decode(errors="replace")  # a damaged row is one row, and fails its checksum
    try:
        if not _check_schema(db):
            _create(db)
            _give_to_owner(path)
        db.execute("PRAGMA synchronous=NORMAL")
    except BaseException as e:
        db.close()
        if isinstance(e, sqlite3.Error | UnicodeDecodeError) and _is_damage(e):
            raise _Unusable(str(e)) from e
        raise
    return db


def _check_file(path: Path) -> None:
    """A store that somebody else can write could name any digest for any file."""
    try:
        st = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(st.st_mode):
        raise _Unusable("not a regular file")
    if st.st_mode & 0o022:
        raise _Unusable(f"mode {stat.S_IMODE(st.st_mode):04o}: others may write it")
    if st.st_uid not in {0, os.geteuid(), path.parent.stat().st_uid}:
        raise _Unusable(f"it belongs to uid {st.st_uid}, the directory does not")


def _check_schema(db: sqlite3.Connection) -> bool:
    """True for a store of ours, False for an empty file. Raises _Unusable for anything else."""
    objects = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")]
    marks = db.execute("PRAGMA application_id").fetchone()[0], db.execute("PRAGMA user_version").fetchone()[0]
    if not objects and marks == (0, 0):
        return False
    if marks != (_APPLICATION_ID, _VERSION) or objects != _SCHEMA:
        raise _Unusable(f"application and version {marks}, not {(_APPLICATION_ID, _VERSION)} with its tables")
    return True


def _create(db: sqlite3.Connection) -> None:
    with _transaction(db):
        if _check_schema(db):  # another process was faster
            return
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version={_VERSION}")


def _give_to_owner(path: Path) -> None:
    """Readable for all whatever the umask; and a store that root's CLI happened to make is still the daemon's."""
    path.chmod(0o644)
    owner = path.parent.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.chown(path, owner.st_uid, owner.st_gid)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _is_damage(e: sqlite3.Error | UnicodeDecodeError) -> bool:
    """The file is broken, foreign or was replaced under us, as opposed to busy, full or read-only.

    An error message that quotes a damaged schema is no UTF-8, and comes as a UnicodeDecodeError.
    """
    if isinstance(e, UnicodeDecodeError):
        return True
    code = getattr(e, "sqlite_errorcode", 0)
    moved = (sqlite3.SQLITE_READONLY_DBMOVED,)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR) or code in moved


def _file(stamp: Stamp) -> str:
    return f"{stamp.device}:{stamp.inode}"  # inode numbers can exceed SQLite's integers


def _stamp(stamp: Stamp) -> str:
    return f"{stamp.size}:{stamp.mtime_ns}:{stamp.ctime_ns}"


def _sealed(*values: object) -> tuple[object, ...]:
    """A row with its checksum at the end."""
    return *values, hashlib.sha256(repr(values).encode()).hexdigest()[:16]
