# SPDX-License-Identifier: Apache-2.0
"""A rank's address: one daemon per path, whatever happens to the file; systemd's socket is used and left alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon, Manager, publish, query

from wcache.host.fds import close_all
from wcache.model import RankState
from wcache.protocol.messages import Attach

STARTS = 8


def inode(path: Path) -> int:
    return path.lstat().st_ino


def ended(daemon: Daemon) -> int:
    assert daemon.process is not None
    return daemon.process.wait(20.0)


def test_a_second_daemon_is_refused_while_the_first_is_stopped(make_daemon: Callable[..., Daemon]) -> None:
    first, second = make_daemon().start(), make_daemon()
    before = inode(first.path)
    os.kill(first.pid, signal.SIGSTOP)
    assert ended(second.start(wait=False)) == 1
    assert "already_running_or_unknown" in first.log
    assert inode(first.path) == before
    os.kill(first.pid, signal.SIGCONT)
    assert first.status().pid == first.pid


def test_of_many_starts_at_once_exactly_one_wins(
    make_daemon: Callable[..., Daemon], wait_until: Callable[..., None]
) -> None:
    daemons = [make_daemon().start(wait=False) for _ in range(STARTS)]
    processes = [d.process for d in daemons if d.process is not None]
    wait_until(lambda: sum(p.poll() is not None for p in processes) == STARTS - 1, 60.0, "all but one end")
    (winner,) = [d for d in daemons if d.process is not None and d.process.poll() is None]
    assert {p.poll() for p in processes} == {None, 1}
    assert winner.status().pid == winner.pid


def test_a_killed_daemons_socket_does_not_stop_the_next(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    daemon.kill()
    assert daemon.path.exists()
    assert daemon.start().status().state is RankState.READY


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_refused_and_left_alone(make_daemon: Callable[..., Daemon], kind: str) -> None:
    daemon = make_daemon()
    daemon.socket_dir.mkdir()
    if kind == "file":
        daemon.path.write_text("mine")
    elif kind == "directory":
        daemon.path.mkdir()
    else:
        daemon.path.symlink_to("elsewhere")
    before = inode(daemon.path)
    assert ended(daemon.start(wait=False)) == 2
    assert "is no socket" in daemon.log
    assert inode(daemon.path) == before


def test_a_removed_socket_is_made_again_and_entries_stay(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query())
    daemon.path.unlink()
    daemon.wait_answer()
    assert len(daemon.status().shards) == 1


def test_a_removed_directory_is_made_again_and_still_guarded(
    daemon: Daemon, make_daemon: Callable[..., Daemon]
) -> None:
    shutil.rmtree(daemon.socket_dir)
    daemon.wait_answer()
    assert ended(make_daemon().start(wait=False)) == 1


def test_a_socket_somebody_put_in_our_place_survives_our_end(daemon: Daemon) -> None:
    daemon.path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as foreign:
        foreign.bind(str(daemon.path))
        before = inode(daemon.path)
        assert daemon.stop() == 0
    assert inode(daemon.path) == before


@pytest.fixture
def listener(short_dir: Path) -> Iterator[socket.socket]:
    """systemd's socket: bound and listening before the daemon is there."""
    (short_dir / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(short_dir / "run" / "rank-0.sock"))
        sock.listen(64)
        yield sock


def test_an_inherited_socket_is_served_and_never_unlinked(
    make_daemon: Callable[..., Daemon], manager: Manager, listener: socket.socket
) -> None:
    daemon = make_daemon(manager=manager, listener=listener).start()
    before = inode(daemon.path)
    with daemon.connect("engine") as writer:
        publish(writer, query())
    daemon.kill()
    daemon.start()
    with daemon.connect("engine") as reader:
        _, manifest, fds = reader.attach(Attach(query=query()))
        close_all([manifest, *fds])
    assert daemon.stop() == 0
    assert inode(daemon.path) == before


def test_a_foreground_daemon_does_not_take_a_running_units_socket(
    make_daemon: Callable[..., Daemon], listener: socket.socket
) -> None:
    unit = make_daemon(listener=listener).start()
    assert ended(make_daemon().start(wait=False)) == 1
    assert unit.status().pid == unit.pid


@pytest.mark.parametrize(
    ("family", "kind", "message"),
    [(socket.AF_INET, socket.SOCK_STREAM, "AF_INET/SOCK_STREAM"), (socket.AF_UNIX, socket.SOCK_STREAM, "SOCK_STREAM")],
)
def test_a_socket_of_another_kind_is_refused(
    make_daemon: Callable[..., Daemon], family: int, kind: int, message: str
) -> None:
    with socket.socket(family, kind) as wrong:
        daemon = make_daemon(listener=wrong)
        assert ended(daemon.start(wait=False)) == 1
        assert message in daemon.log


def test_closed_and_full_standard_streams_do_not_matter(make_daemon: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_daemon(manager=manager).start()
    daemon.stop()
    toml = daemon.directory / "wcache.toml"
    for redirect in ("0<&- 1>&- 2>&-", ">/dev/full 2>&1"):
        manager.told.clear()
        command = f"exec {sys.executable} -m wcache.daemon --rank 0 --config {toml} {redirect}"
        environment = os.environ | {"NOTIFY_SOCKET": str(manager.path)}
        daemon.process = subprocess.Popen(["/bin/sh", "-c", command], env=environment)
        manager.wait_told("READY=1")
        with daemon.connect("engine") as writer:
            publish(writer, query(redirect))
        daemon.kill()


def test_without_a_home_and_with_next_to_no_environment_it_serves(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    daemon.stop()
    toml = daemon.directory / "wcache.toml"
    command = [sys.executable, "-m", "wcache.daemon", "--rank", "0", "--config", str(toml)]
    daemon.process = subprocess.Popen(command, env={}, stderr=subprocess.DEVNULL)
    daemon.wait_answer()
    assert daemon.status().state is RankState.READY


@pytest.mark.parametrize(
    ("config", "rank", "status", "words"),
    [
        ({"modle": "x"}, 0, 2, "modle"),
        ({}, 7, 4, "rank 7"),
        ({"model": "/m", "plan": "/nowhere.toml"}, 0, 2, "/nowhere.toml"),
    ],
    ids=["unknown-key", "no-such-rank", "plan"],
)
def test_a_wrong_configuration_ends_at_once_with_its_own_status(
    make_daemon: Callable[..., Daemon], config: dict[str, object], rank: int, status: int, words: str
) -> None:
    daemon = make_daemon(config=config, rank=rank)
    assert ended(daemon.start(wait=False)) == status
    assert words in daemon.log
