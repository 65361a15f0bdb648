# SPDX-License-Identifier: Apache-2.0
"""The digest store saves hashing and nothing else: whatever is wrong with it, the answer is never a wrong digest."""

from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wcache.host.flock import FileLock
from wcache.weights.checkpoint_file import Stamp
from wcache.weights.digests import Claim, DigestStore, settled

OLD = Stamp(device=1, inode=2, size=3, mtime_ns=1_000_000_000_123, ctime_ns=1_000_000_000_456)
A, B = "a" * 64, "b" * 64
S = 1_000_000_000
fork = multiprocessing.get_context("fork")


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """multiprocessing keeps one helper process for as long as this one lives."""
    resource_tracker.ensure_running()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "digests.sqlite"


def stamp(**change: int) -> Stamp:
    return Stamp(**{**{f: getattr(OLD, f) for f in Stamp.__slots__}, **change})


def test_a_recorded_digest_is_known_by_its_stamp_also_to_the_next_process(path: Path) -> None:
    with DigestStore(path) as store:
        assert store.lookup(OLD) is None
        store.record(OLD, A, time.time())
        assert store.lookup(OLD) == A
    with DigestStore(path) as store:
        assert store.lookup(OLD) == A


@pytest.mark.parametrize("field", Stamp.__slots__)
def test_a_stamp_that_differs_in_any_part_is_unknown(path: Path, field: str) -> None:
    with DigestStore(path) as store:
        store.record(OLD, A, time.time())
        assert store.lookup(stamp(**{field: getattr(OLD, field) + 1})) is None


def test_device_and_inode_numbers_of_64_bits_are_no_problem(path: Path) -> None:
    large = stamp(device=2**64 - 1, inode=2**64 - 1)
    with DigestStore(path) as store:
        store.record(large, A, time.time())
        assert store.lookup(large) == A


def test_a_file_has_one_row_however_often_it_changes(path: Path) -> None:
    with DigestStore(path) as store:
        for i in range(5):
            store.record(stamp(mtime_ns=OLD.mtime_ns + i), A, time.time())
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM digests").fetchone() == (1,)
    db.close()


def test_a_path_that_is_asked_for_must_agree_too(path: Path) -> None:
    with DigestStore(path) as store:
        store.record(OLD, A, time.time(), "/models/a")
        assert store.lookup(OLD) == store.lookup(OLD, "/models/a") == A
        assert store.lookup(OLD, "/models/b") is None


# --- settled stamps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ctime_ns", "mtime_ns", "started_ns", "expected"),
    [
        (100 * S + 1, 100 * S + 1, 200 * S, True),  # long before
        (100 * S + 1, 100 * S + 1, 100 * S + 2, False),  # in the same tick
        (100 * S + 1, 50 * S + 1, 100 * S + 90_000_000, False),  # mtime set back, ctime fresh
        (100 * S + 1, 100 * S + 1, 100 * S + 200_000_000, True),
        (100 * S, 100 * S, 101 * S, False),  # a clock that counts in seconds
        (100 * S, 100 * S, 103 * S, True),
        (100 * S + 1, 900 * S + 1, 200 * S, True),  # mtime in the future by utime
        (900 * S + 1, 900 * S + 1, 200 * S, True),  # written before the clock was set back
        (900 * S, 900 * S, 200 * S, False),  # the same in whole seconds: the next write may share the second
    ],
)
def test_a_stamp_is_settled_if_a_later_write_must_move_it(ctime_ns, mtime_ns, started_ns, expected) -> None:
    assert settled(stamp(ctime_ns=ctime_ns, mtime_ns=mtime_ns), started_ns) is expected


def test_a_digest_taken_in_the_tick_of_the_last_write_is_not_trusted(path: Path) -> None:
    now = time.time_ns()
    fresh = stamp(mtime_ns=now, ctime_ns=now)
    with DigestStore(path) as store:
        store.record(fresh, A, now / 1e9)
        assert store.lookup(fresh) is None
        store.record(fresh, A, now / 1e9 + 3)
        assert store.lookup(fresh) == A


@pytest.mark.parametrize("jump_s", [-10 * 365 * 86400, -3600, 3600, 10 * 365 * 86400])
def test_a_clock_that_jumps_neither_loses_digests_nor_invents_any(path: Path, monkeypatch, jump_s: int) -> None:
    real = time.time
    with DigestStore(path) as store:
        store.record(OLD, A, time.time())
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        assert store.lookup(OLD) == A
        assert store.lookup(stamp(ctime_ns=OLD.ctime_ns + 1)) is None
        other = stamp(inode=3, mtime_ns=time.time_ns(), ctime_ns=time.time_ns())
        store.record(other, B, time.time())
        monkeypatch.undo()
        assert store.lookup(other) == B
        assert store.lookup(stamp(inode=3)) is None


# --- the `stat` policy ------------------------------------------------------------------------------------------------


def test_a_path_with_its_size_and_time_is_known_within_a_millisecond(path: Path) -> None:
    with DigestStore(path) as store:
        store.record(OLD, A, time.time(), "/m/a")
        assert store.lookup_path("/m/a", OLD.size, OLD.mtime_ns) == A
        assert store.lookup_path("/m/a", OLD.size, OLD.mtime_ns - 1_000_000) == A
        assert store.lookup_path("/m/a", OLD.size, OLD.mtime_ns + 1_000_001) is None
        assert store.lookup_path("/m/a", OLD.size + 1, OLD.mtime_ns) is None
        assert store.lookup_path("/m/b", OLD.size, OLD.mtime_ns) is None


def test_a_path_hashed_right_after_it_was_written_is_not_known_by_its_time(path: Path) -> None:
    now = time.time_ns()
    with DigestStore(path) as store:
        store.record(stamp(mtime_ns=now), A, now / 1e9, "/m/a")
        assert store.lookup_path("/m/a", OLD.size, now) is None


# --- the word of a hub cache ------------------------------------------------------------------------------------------


def test_a_claim_stands_until_the_stamp_moves(path: Path) -> None:
    with DigestStore(path) as store:
        assert store.accept_claim(OLD, A)
        assert store.accept_claim(OLD, A)
        assert store.lookup(OLD) is None  # a claim is no digest
        assert not store.accept_claim(stamp(ctime_ns=OLD.ctime_ns + 1), A)
        assert not store.accept_claim(stamp(ctime_ns=OLD.ctime_ns + 1), A)  # and stays refused


def test_a_claim_does_not_stand_against_a_digest(path: Path) -> None:
    with DigestStore(path) as store:
        store.record(OLD, B, time.time())
        assert not store.accept_claim(OLD, A)
        assert not store.accept_claim(stamp(ctime_ns=1), A)


def test_an_inode_number_that_went_to_another_blob_does_not_hold_against_it(path: Path) -> None:
    with DigestStore(path) as store:
        assert store.accept_claim(OLD, A)
        assert store.accept_claim(stamp(size=9, ctime_ns=9), B)


# --- a store that is not what it should be ----------------------------------------------------------------------------


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE digests (file TEXT, stamp TEXT, sha256 TEXT)")
    db.close()


def older(path: Path) -> None:
    DigestStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=0")
    db.close()


def altered(path: Path) -> None:
    DigestStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TRIGGER t AFTER INSERT ON digests BEGIN UPDATE digests SET sha256 = 'x'; END")
    db.close()


def writable_by_others(path: Path) -> None:
    DigestStore(path).close()
    path.chmod(0o666)


def by_somebody_else(path: Path) -> None:
    DigestStore(path).close()
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        path.chmod(0o622)


BAD_STORES = {
    "garbage": lambda p: p.write_bytes(b"no database, this " * 500),
    "cut": lambda p: (DigestStore(p).close(), os.truncate(p, 5000)),
    "a directory": lambda p: p.mkdir(),
    "a FIFO": os.mkfifo,
    "a dangling symlink": lambda p: p.symlink_to("nowhere"),
    "foreign": foreign,
    "older": older,
    "altered": altered,
    "writable by others": writable_by_others,
    "by somebody else": by_somebody_else,
}


@pytest.mark.parametrize("case", BAD_STORES)
def test_an_unusable_store_is_moved_aside_and_rebuilt(path: Path, case: str, caplog) -> None:
    path.parent.mkdir()
    BAD_STORES[case](path)
    with DigestStore(path) as store:
        assert store.lookup(OLD) is None
        store.record(OLD, A, time.time())
        assert store.lookup(OLD) == A
    assert os.path.lexists(path.with_name("digests.sqlite.unusable"))
    assert "moved aside" in caplog.text


def test_a_store_that_is_damaged_or_deleted_under_way_is_rebuilt(path: Path) -> None:
    with DigestStore(path) as store:
        store.record(OLD, A, time.time())
        path.write_bytes(b"garbage" * 4000)
        assert store.lookup(OLD) is None
        store.record(OLD, A, time.time())
        path.unlink()
        store.record(OLD, B, time.time())
        assert store.lookup(OLD) == B
    with DigestStore(path) as store:
        assert store.lookup(OLD) == B


def test_a_journal_left_beside_a_damaged_store_is_not_played_back(path: Path) -> None:
    with DigestStore(path) as store:
        store.record(OLD, A, time.time())
    path.write_bytes(b"garbage" * 4000)
    journal = path.with_name(path.name + "-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0" * 504)
    with DigestStore(path) as store:
        assert store.lookup(OLD) is None
    assert not journal.exists()


def test_a_schema_that_is_no_text_any_more_is_damage(path: Path) -> None:
    DigestStore(path).close()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE digests", b"CREATE TABLE \xffigests"))
    with DigestStore(path) as store:
        store.record(OLD, A, time.time())
        assert store.lookup(OLD) == A


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 40))
def test_flipped_bytes_in_the_store_never_give_a_wrong_digest(tmp_path_factory, seed: int, flips: int) -> None:
    path = tmp_path_factory.mktemp("store") / "digests.sqlite"
    stamps = [stamp(inode=i) for i in range(50)]
    with DigestStore(path) as store:
        store.record_all((s, f"{s.inode:064x}", time.time(), f"/m/{s.inode}") for s in stamps)
    data = bytearray(path.read_bytes())
    dice = random.Random(seed)
    for _ in range(flips):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    with DigestStore(path) as store:
        for s in stamps:
            assert store.lookup(s) in {None, f"{s.inode:064x}"}
            assert store.lookup_path(f"/m/{s.inode}", s.size, s.mtime_ns) in {None, f"{s.inode:064x}"}


def test_without_a_place_for_a_store_everything_is_unknown_and_that_is_said_once(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    with DigestStore(tmp_path / "file" / "digests.sqlite") as store:
        for _ in range(3):
            store.record(OLD, A, time.time())
            assert store.lookup(OLD) is None
            assert store.accept_claim(OLD, A)
            with store.claim(OLD):
                pass
    assert len([r for r in caplog.records if "no digest store" in r.message]) == 1
    assert len(caplog.records) == 2


def test_a_store_that_is_locked_for_too_long_does_not_stop_anybody(path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("wcache.weights.digests.BUSY_TIMEOUT_S", 0.05)
    with DigestStore(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        store.record(OLD, A, time.time())
        assert store.lookup(OLD) is None
        other.execute("ROLLBACK")
        other.close()
        store.record(OLD, A, time.time())
        assert store.lookup(OLD) == A
    assert "locked" in caplog.text


def as_nobody(path: Path, answers) -> None:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    with DigestStore(path) as store:
        store.record(OLD, B, time.time())
        answers.put(store.lookup(OLD))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_reads_the_store_and_cannot_write_it(tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("shared") / "digests.sqlite"
    directory = path.parent
    while directory.stat().st_uid == os.geteuid() and directory != directory.parent and "pytest" in str(directory):
        directory.chmod(0o755)
        directory = directory.parent
    with DigestStore(path) as store:
        store.record(OLD, A, time.time())
        answers = multiprocessing.get_context("fork").SimpleQueue()
        child = multiprocessing.get_context("fork").Process(target=as_nobody, args=(path, answers))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert answers.get() == A
        assert store.lookup(OLD) == A
    answers.close()
    child.close()


# --- several processes ------------------------------------------------------------------------------------------------


def hammer(path: Path, worker: int, rounds: int) -> None:
    """Writes, reads, and now and then ruins the store, as no process should."""
    with DigestStore(path) as store:
        for i in range(rounds):
            mine = stamp(inode=worker * rounds + i)
            store.record(mine, f"{mine.inode:064x}", time.time())
            for inode in range(0, 4 * rounds, 7):
                found = store.lookup(stamp(inode=inode))
                assert found in {None, f"{inode:064x}"}, found
            if worker == 0 and i == rounds // 2:
                path.write_bytes(b"ruined" * 3000)


@pytest.mark.parametrize("ruin", [False, True], ids=["peaceful", "ruined under way"])
def test_four_processes_share_a_store_and_lose_nothing(path: Path, ruin: bool) -> None:
    workers = [fork.Process(target=hammer, args=(path, i, 30)) for i in range(0 if ruin else 1, 4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
        worker.close()
    with DigestStore(path) as store:
        known = [store.lookup(stamp(inode=i)) for i in range(30, 120)]
        if not ruin:
            assert known == [f"{i:064x}" for i in range(30, 120)]
        store.record(OLD, A, time.time())
        assert store.lookup(OLD) == A


def hold(path: Path, ready, stop) -> None:
    with DigestStore(path) as store, store.claim(OLD):
        ready.set()
        stop.wait(60)


def test_a_file_is_claimed_by_one_process_and_taken_over_when_that_dies(path: Path) -> None:
    ready, stop = fork.Event(), fork.Event()
    holder = fork.Process(target=hold, args=(path, ready, stop))
    holder.start()
    assert ready.wait(30)
    with DigestStore(path) as store:
        assert store.claim(OLD) is None
        assert store.wait(OLD, 0) is None
        other = store.claim(stamp(inode=9))
        assert other is not None
        other.release()
        holder.kill()
        claim = store.wait(OLD, 30)
        assert isinstance(claim, Claim)
        claim.release()
    holder.join(10)
    holder.close()
    assert list((path.parent / "claims").iterdir()) == []


def test_who_waits_gets_the_digest_of_who_hashes(path: Path) -> None:
    with DigestStore(path) as store, DigestStore(path) as other:
        claim = store.claim(OLD)
        answers = []
        waiter = threading.Thread(target=lambda: answers.append(other.wait(OLD, 30)))
        waiter.start()
        store.record(OLD, A, time.time())
        claim.release()
        waiter.join(30)
        assert answers == [A]


def test_a_lock_whose_file_was_removed_is_not_held_by_two(tmp_path: Path) -> None:
    first = FileLock.try_acquire(tmp_path / "x.lock")
    assert FileLock.try_acquire(tmp_path / "x.lock") is None
    with pytest.raises(TimeoutError, match="stayed locked"):
        FileLock.acquire(tmp_path / "x.lock", 0.05)
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    with FileLock.acquire(tmp_path / "x.lock", 1):
        assert FileLock.try_acquire(tmp_path / "x.lock") is None
