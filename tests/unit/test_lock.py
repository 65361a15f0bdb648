# SPDX-License-Identifier: Apache-2.0
"""One daemon per path, decided by a lock alone; nothing that is not ours is ever removed."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcache.errors import Busy, ConfigError
from wcache.host.lock import BoundSocket, clear_stale, lock_path, take_lock


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "rank-0.sock"


def leave_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))


def test_the_lock_is_held_until_its_descriptor_closes_and_its_file_stays(path: Path) -> None:
    with take_lock(path):
        with pytest.raises(Busy, match="already_running_or_unknown"):
            take_lock(path)
    take_lock(path).close()
    assert lock_path(path).exists()


def test_the_lock_of_a_killed_process_is_free(path: Path) -> None:
    code = (
        "import os\nfrom pathlib import Path\nfrom wcache.host.lock import take_lock\n"
        f"held = take_lock(Path({str(path)!r}))\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code])
    take_lock(path).close()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    leave_stale(path)
    with take_lock(path) as lock:
        bound = BoundSocket(path, lock)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
        bound.close(unlink=True)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling"])
def test_what_is_no_socket_is_left_alone(path: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "file":
        path.write_text("mine")
    elif kind == "directory":
        path.mkdir()
    else:
        if kind == "link":
            leave_stale(target)
        path.symlink_to(target)
    before = path.lstat()
    with take_lock(path) as lock, pytest.raises(ConfigError, match="no socket"):
        BoundSocket(path, lock)
    assert path.lstat().st_ino == before.st_ino


def test_a_lock_whose_file_was_replaced_protects_nothing(path: Path) -> None:
    leave_stale(path)
    with take_lock(path) as lock:
        lock_path(path).unlink()
        with pytest.raises(Busy, match="lost"):
            BoundSocket(path, lock)
    assert path.exists()


def test_a_lock_file_that_is_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    lock_path(path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        take_lock(path)
    assert not (tmp_path / "elsewhere").exists()


def test_only_the_owner_may_connect_from_the_first_moment(path: Path) -> None:
    with take_lock(path) as lock:
        bound = BoundSocket(path, lock)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        bound.close(unlink=True)


def test_a_foreign_socket_at_our_path_survives_our_end(path: Path) -> None:
    with take_lock(path) as lock:
        bound = BoundSocket(path, lock)
        path.unlink()
        leave_stale(path)
        assert not bound.intact()
        bound.close(unlink=True)
    assert path.exists()


def test_cleaning_removes_a_dead_daemons_socket_and_no_living_ones(path: Path) -> None:
    assert not clear_stale(path)
    leave_stale(path)
    with take_lock(path), pytest.raises(Busy):
        clear_stale(path)
    assert path.exists()
    assert clear_stale(path)
    assert not path.exists()
