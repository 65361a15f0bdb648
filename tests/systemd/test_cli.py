# SPDX-License-Identifier: Apache-2.0
"""The command line under a real systemd: what an operator types, and what they are told."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from private_systemd import Manager, seconds_until

from wcache.cli.ranks import GroupReport

pytestmark = pytest.mark.systemd


def look(manager: Manager) -> GroupReport:
    return msgspec.json.decode(manager.cli("status", "--json", check=False).stdout, type=GroupReport)


def states(manager: Manager) -> list[str]:
    return [rank.state for rank in look(manager).ranks]


def test_start_waits_until_every_rank_is_ready(group: Manager) -> None:
    done = group.cli("start")
    assert re.fullmatch(r"(rank \d: ready: 1 shard, [^\n]*\n){2}", done.stdout)
    assert "all ready after" in done.stderr
    assert states(group) == ["ready", "ready"]
    assert group.show("wcache.target", "ActiveState") == "active"


def test_looking_at_a_stopped_rank_does_not_start_it(group: Manager) -> None:
    group.systemctl("start", "wcache@0.socket", "wcache@1.socket")
    for verb in (["status"], ["verify"], ["explain", "--last"], ["doctor"]):
        group.cli(*verb, check=False)
    assert states(group) == ["stopped", "stopped"]
    assert group.show("wcache@0.service", "ActiveState") == "inactive"
    assert group.cli("status", check=False).returncode == 3


def test_restart_group_takes_the_same_memory_back(ready: Manager) -> None:
    before = [(rank.status.nonce, rank.status.shards[0].generation) for rank in look(ready).ranks if rank.status]
    with ready.engine(0) as engine:
        first = engine.digest()
        ready.cli("restart-group")
        after = [(rank.status.nonce, rank.status.shards[0].generation) for rank in look(ready).ranks if rank.status]
        assert [generation for _, generation in after] == [generation for _, generation in before]
        assert all(new != old for (new, _), (old, _) in zip(after, before, strict=True))
        with ready.engine(0) as again:
            assert again.inodes == engine.inodes and again.digest() == first


def test_restart_group_reload_reads_anew_and_engines_keep_what_they_map(ready: Manager) -> None:
    with ready.engine(0) as engine:
        first = engine.digest()
        done = ready.cli("restart-group", "--reload")
        assert "all ready after" in done.stderr
        assert engine.digest() == first
        with ready.engine(0) as anew:
            assert anew.inodes != engine.inodes and anew.digest() == first


def test_restart_group_starts_what_was_stopped_or_had_failed(group: Manager, llama: Path) -> None:
    text = group.host.path(group.config).read_text()
    group.write(group.config, text.replace(str(llama), "/nowhere"))
    done = group.cli("start", check=False)
    assert done.returncode == 1
    assert re.match(r"wcache: rank [01](, 1)?: .*/nowhere: no such directory", done.stderr.splitlines()[-2])
    assert done.stderr.splitlines()[-1] == "hint: wcache logs shows why"
    group.write(group.config, text)
    group.cli("restart-group")
    assert states(group) == ["ready", "ready"]


def test_stop_frees_memory_and_names_the_engines_that_still_map_it(ready: Manager) -> None:
    with ready.engine(0):
        done = ready.cli("stop")
        first, second, third = done.stdout.splitlines()
        assert re.fullmatch(r"rank 0: stopped; 0 B freed, 5\d\d\.\d KiB still mapped", first)
        assert "test engine (pid" in second or "test engine goes on" in second
        assert re.fullmatch(r"rank 1: stopped; 5\d\d\.\d KiB freed", third)
    assert states(ready) == ["stopped", "stopped"]
    assert not ready.host.path("/run/wcache/rank-0.sock").exists()
    assert ready.cli("start").returncode == 0


def test_one_rank_is_stopped_and_started_alone(ready: Manager) -> None:
    ready.cli("stop", "1")
    assert states(ready) == ["ready", "stopped"]
    assert ready.cli("status", "0").returncode == 0
    assert ready.cli("status", "1", check=False).returncode == 3
    ready.cli("start", "1")
    assert states(ready) == ["ready", "ready"]


def test_a_killed_daemon_is_named_with_its_end_until_it_is_back(ready: Manager) -> None:
    ready.drop_in("[Service]\nRestartSec=60s\n")
    ready.kill(1)
    seconds_until(lambda: states(ready)[1] == "restarting", 20, "the manager noticed")
    report = look(ready)
    assert [rank.ready for rank in report.ranks] == [True, False]
    assert "killed by SIGKILL" in report.ranks[1].problem
    ready.cli("restart-group")
    assert states(ready) == ["ready", "ready"]


def test_a_hung_daemon_is_unresponsive_and_the_others_are_shown(ready: Manager) -> None:
    ready.kill(1, "STOP")
    try:
        assert states(ready) == ["ready", "unresponsive"]
    finally:
        ready.kill(1, "CONT")


def test_clean_leaves_sockets_of_the_manager_alone(ready: Manager) -> None:
    done = ready.cli("clean")
    assert done.stdout.splitlines() == [f"rank {r}: its socket belongs to wcache@{r}.socket" for r in (0, 1)]
    assert states(ready) == ["ready", "ready"]


def test_a_socket_that_a_cleaner_removed_is_made_anew_by_restart_group(ready: Manager) -> None:
    before = [rank.status.shards[0].generation for rank in look(ready).ranks if rank.status]
    ready.host.path("/run/wcache/rank-0.sock").unlink()
    ready.cli("restart-group")
    assert states(ready) == ["ready", "ready"]
    assert [rank.status.shards[0].generation for rank in look(ready).ranks if rank.status] == before


def test_start_refuses_beside_a_daemon_that_no_unit_runs(group: Manager) -> None:
    script = f"{group.wcache} daemon --rank 0 2>/dev/null & echo $!"
    pid = group.run("sh", "-c", script.replace("2>/dev/null", ">/dev/null 2>&1")).stdout.strip()
    try:
        seconds_until(lambda: group.host.path("/run/wcache/rank-0.sock").exists(), 20, "the daemon listens")
        done = group.cli("start", check=False)
        assert done.returncode == 1
        assert "another daemon holds" in done.stderr
        assert look(group).ranks[0].status is not None
    finally:
        group.run("kill", pid)


def test_doctor_finds_nothing_wrong_with_a_good_group(ready: Manager) -> None:
    done = ready.cli("doctor")
    assert "failed" not in done.stdout
    assert "units: 4 and wcache.target in the system manager" in done.stdout


def test_doctor_fails_where_the_fd_store_is_off(ready: Manager) -> None:
    ready.drop_in("[Service]\nFileDescriptorStoreMax=0\n")
    done = ready.cli("doctor", check=False)
    assert done.returncode == 1
    assert "its fd store is off" in done.stdout


def test_the_manager_that_has_the_units_is_found_without_being_named(user: Manager) -> None:
    user.cli("start")
    done = user.run(user.wcache, "status")
    assert "1 of 1 rank ready" in done.stdout and "user manager" in done.stdout
    user.cli("stop")
