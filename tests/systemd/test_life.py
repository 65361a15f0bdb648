# SPDX-License-Identifier: Apache-2.0
"""A group of ranks under a real systemd: activation, readiness, and memory that outlives daemons but not a stop."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from private_systemd import WCACHE, Manager, Traced, seconds_until

from wcache.errors import Unavailable
from wcache.model import RankState

pytestmark = pytest.mark.systemd


def test_the_target_returns_when_every_rank_is_ready_and_says_so_in_its_status(ready: Manager) -> None:
    for rank in (0, 1):
        unit = f"wcache@{rank}.service"
        assert ready.show(unit, "ActiveState") == "active"
        assert ready.show(unit, "StatusText").startswith("ready: 1 shard")
        assert ready.number(unit, "NFileDescriptorStore") == 2
        assert ready.status(rank).state is RankState.READY


def test_a_daemon_is_small_runs_in_our_slice_and_needs_no_home(ready: Manager) -> None:
    environment = ready.run("sh", "-c", f"tr '\\0' '\\n' </proc/{ready.pid(0)}/environ").stdout.splitlines()
    assert not [line for line in environment if line.startswith("HOME=")]
    assert ready.show("wcache@0.service", "Slice") == "wcache.slice"
    rss = re.search(r"VmRSS:\s+(\d+) kB", ready.run("cat", f"/proc/{ready.pid(0)}/status").stdout)
    assert rss is not None and int(rss[1]) < 60 * 1024


def test_sockets_are_private_from_the_moment_they_exist(ready: Manager) -> None:
    mode = ready.host.path("/run/wcache/rank-0.sock").stat().st_mode
    assert mode & 0o777 == 0o600


def test_a_connection_starts_a_rank_whose_socket_listens_and_is_answered_while_it_loads(group: Manager) -> None:
    group.systemctl("start", "wcache@0.socket")
    assert group.show("wcache@0.service", "ActiveState") == "inactive"
    assert group.status(0).state is not RankState.FAILED
    seconds_until(lambda: group.status(0).state is RankState.READY, 60, "ready")
    assert group.number("wcache@0.service", "NRestarts") == 0


def test_a_killed_daemon_comes_back_with_the_same_memory_and_nobody_notices(ready: Manager) -> None:
    for rank in (0, 1):
        inode = ready.socket(rank).stat().st_ino
        with ready.engine(rank) as before:
            first = before.digest()
            pid = ready.pid(rank)
            ready.kill(rank)
            status = ready.status(rank)  # waits, does not fail
            assert (status.shards[0].restored, status.shards[0].generation) == (True, before.generation)
            assert ready.pid(rank) != pid
            assert before.digest() == first
            with ready.engine(rank) as after:
                assert after.inodes == before.inodes
                assert after.digest() == first
        assert ready.socket(rank).stat().st_ino == inode


def test_many_kills_in_a_row_lose_nothing(ready: Manager) -> None:
    with ready.engine(0) as before:
        for _ in range(8):
            ready.kill(0)
            assert ready.status(0).shards[0].generation == before.generation
    seconds_until(lambda: ready.show("wcache@0.service", "ActiveState") == "active", 20, "active again")


@pytest.mark.parametrize("unit", ["wcache@0.service", "wcache.target"])
def test_a_restart_reads_no_byte_of_the_checkpoint(group: Manager, llama: Path, unit: str) -> None:
    traced = Traced(group.host, WCACHE, llama)
    group.drop_in(traced.directives())
    group.systemctl("start", "wcache.target")
    weights = sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    assert traced.bytes_read() > weights and traced.opened()  # the count counts
    with group.engine(0) as before:
        traced.forget()
        group.systemctl("restart", unit)
        assert traced.opened() == []
        assert traced.bytes_read() <= (llama / "model.safetensors.index.json").stat().st_size * 2 + 8192
        with group.engine(0) as after:
            assert (after.inodes, after.digest()) == (before.inodes, before.digest())


def test_a_stop_of_the_target_frees_everything_and_closes_the_sockets(ready: Manager) -> None:
    with ready.engine(0) as engine:
        inode = engine.inodes[0]
        assert ready.host.holders(inode)
        ready.systemctl("stop", "wcache.target")
        # a stop of a target does not wait for its members; this engine's own mapping is all that is left in the end
        seconds_until(lambda: not ready.host.holders(inode), 10, "memory freed")
        engine.digest()
    seconds_until(lambda: not ready.socket(0).exists(), 10, "socket closed")
    with pytest.raises(Unavailable):
        ready.connect(0)
    ready.systemctl("start", "wcache.target")
    assert not ready.status(0).shards[0].restored


def test_a_stop_of_one_rank_leaves_the_others_alone(ready: Manager) -> None:
    generation = ready.status(1).shards[0].generation
    ready.systemctl("stop", "wcache@0.service", "wcache@0.socket")
    assert ready.status(1).shards[0].generation == generation
    assert ready.show("wcache.target", "ActiveState") == "active"


def test_a_stuck_daemon_is_replaced_by_the_watchdog_and_loses_nothing(group: Manager) -> None:
    group.drop_in("[Service]\nWatchdogSec=2s\nTimeoutStopSec=2s\nTimeoutAbortSec=2s\n")
    group.systemctl("start", "wcache@0.service")
    with group.engine(0) as before:
        pid = group.pid(0)
        group.kill(0, "STOP")
        seconds_until(lambda: group.pid(0) not in (0, pid), 30, "another daemon")
        with group.engine(0) as after:
            assert after.inodes == before.inodes
    assert group.number("wcache@0.service", "NRestarts") == 1


def test_the_watchdog_leaves_an_idle_and_a_busy_daemon_alone(group: Manager) -> None:
    group.drop_in("[Service]\nWatchdogSec=1s\n")
    group.systemctl("start", "wcache@0.service")
    pid = group.pid(0)
    connections = [group.connect(0) for _ in range(50)]
    beat = group.number("wcache@0.service", "WatchdogTimestampMonotonic")
    seconds_until(
        lambda: group.number("wcache@0.service", "WatchdogTimestampMonotonic") > beat + 3_000_000, 20, "six heart beats"
    )
    for connection in connections:
        connection.close()
    assert group.pid(0) == pid


@pytest.mark.parametrize("kind", ["socket", "file"])
def test_what_a_dead_daemon_left_at_the_address_does_not_stop_a_start(group: Manager, kind: str) -> None:
    group.run("mkdir", "-p", "/run/wcache")
    path = group.host.path("/run/wcache/rank-0.sock")
    if kind == "socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
            stale.bind(str(path))
    else:
        group.host.path("/run/wcache/rank-0.sock.lock").touch()
    group.cli("start")
    assert group.status(0).state is RankState.READY


def test_wcache_restart_group_keeps_what_matches_and_with_reload_reads_anew(ready: Manager) -> None:
    generation = ready.status(0).shards[0].generation
    ready.cli("restart-group")
    assert ready.status(0).shards[0].generation == generation
    ready.cli("restart-group", "--reload")
    assert ready.status(0).shards[0].generation > generation


def test_a_store_that_lost_its_commit_record_is_dropped_and_loaded_afresh(group: Manager, shared_dir: Path) -> None:
    group.systemctl("start", "wcache@0.service")
    old = group.status(0).shards[0].generation
    thief = shared_dir / "thief.py"
    thief.write_text(
        "import os, socket\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.connect(os.environ['NOTIFY_SOCKET'].replace('@', chr(0), 1))\n"
        "for name in os.environ['LISTEN_FDNAMES'].split(':'):\n"
        "    if name.startswith('manifest.'):\n"
        "        s.send(b'FDSTOREREMOVE=1\\nFDNAME=' + name.encode())\n"
        "s.send(b'READY=1')\n"
        "while True:\n"
        "    s.send(b'WATCHDOG=1')\n"
        "    __import__('time').sleep(1)\n"
    )
    group.drop_in(f"[Service]\nExecStart=\nExecStart=/usr/bin/python3 {thief}\n")
    group.systemctl("restart", "wcache@0.service")
    assert group.number("wcache@0.service", "NFileDescriptorStore") == 1
    group.drop_in("")
    group.systemctl("restart", "wcache@0.service")
    shard = group.status(0).shards[0]
    assert (shard.generation > old, shard.restored) == (True, False)
    assert group.number("wcache@0.service", "NFileDescriptorStore") == 2
    assert "dropping shard" in group.host.log("wcache@0.service")


def test_systemd_installed_units_verify_in_place(group: Manager) -> None:
    names = ["wcache.target", "wcache.slice", "wcache@0.service", "wcache@0.socket"]
    done = group.run("systemd-analyze", "verify", *(str(group.units / name) for name in names))
    assert done.stderr == ""
