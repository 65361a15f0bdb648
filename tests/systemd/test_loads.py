# SPDX-License-Identifier: Apache-2.0
"""Loads under a real systemd: long ones are waited for, stalled and hopeless ones are ended, and never for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_systemd import WCACHE, Manager, Traced, config, seconds_until

pytestmark = pytest.mark.systemd
UNIT = "wcache@0.service"


def test_a_load_slower_than_the_start_timeout_succeeds_as_long_as_bytes_move(group: Manager, large: Path) -> None:
    timeout_s = 12
    group.install(config(large, timeouts="{stall_s = 10.0}"))
    traced = Traced(group.host, WCACHE, large)
    slow = traced.directives("-e", "inject=preadv,preadv2:delay_enter=400000")
    group.drop_in(f"{slow}TimeoutStartSec={timeout_s}s\n")
    group.systemctl("start", UNIT)
    begun, ended = (group.number(UNIT, f"{edge}TimestampMonotonic") for edge in ("InactiveExit", "ActiveEnter"))
    assert (ended - begun) / 1e6 > timeout_s
    assert group.number(UNIT, "NRestarts") == 0
    assert group.status(0).shards[0].weight_bytes >= 512 << 20


def test_a_load_that_stalls_is_killed_by_the_start_timeout_and_tried_again(group: Manager, large: Path) -> None:
    group.install(config(large, timeouts="{stall_s = 300.0}"))
    group.drop_in("[Service]\nTimeoutStartSec=8s\nTimeoutStopSec=2s\n")
    group.systemctl("start", "--no-block", UNIT)
    first = stop_loader(group)
    seconds_until(lambda: group.number(UNIT, "NRestarts") >= 1, 40, "a second try")
    seconds_until(lambda: set(loaders(group)) - {first}, 30, "another loader")
    assert first not in loaders(group)


def test_a_load_without_progress_is_given_up_with_a_reason_before_systemd_has_to(group: Manager, large: Path) -> None:
    group.install(config(large, timeouts="{stall_s = 2.0}"))
    group.drop_in("[Service]\nTimeoutStartSec=120s\n")
    group.systemctl("start", "--no-block", UNIT)
    stop_loader(group)
    seconds_until(lambda: "made no progress for 4 s" in group.host.log(UNIT), 60, "the loader given up")


def test_a_rank_whose_load_always_fails_ends_failed_and_its_socket_refuses(group: Manager, shared_dir: Path) -> None:
    group.install(config(shared_dir / "nowhere"))
    group.drop_in("[Unit]\nStartLimitBurst=3\n")
    assert group.systemctl("start", UNIT, check=False).returncode != 0
    seconds_until(lambda: group.show(UNIT, "ActiveState") == "failed", 60, "failed for good")
    assert group.number(UNIT, "NRestarts") >= 2


def test_a_wrong_configuration_is_not_tried_twice(group: Manager, llama: Path) -> None:
    group.install(config(llama))
    group.write(group.config, f'modell = "{llama}"\n')
    assert group.systemctl("start", UNIT, check=False).returncode != 0
    assert group.show(UNIT, "ActiveState") == "failed"
    assert (group.number(UNIT, "NRestarts"), group.number(UNIT, "ExecMainStatus")) == (0, 2)
    assert "unknown key modell; did you mean model" in group.host.log(UNIT)


def test_a_killed_daemon_takes_its_loader_along(group: Manager, large: Path) -> None:
    group.install(config(large))
    group.systemctl("start", "--no-block", UNIT)
    first = stop_loader(group)
    group.kill(0)
    seconds_until(lambda: loaders(group) and first not in loaders(group), 60, "another loader alone")


def loaders(group: Manager) -> list[str]:
    """Pids of loader children, as they are numbered inside."""
    return group.run("pgrep", "-f", "^[^ ]*python[^ ]* .*wcache.engine.loader", check=False).stdout.split()


def stop_loader(group: Manager) -> str:
    """Let the loader of a load that begins hang, as on storage that does not answer."""
    seconds_until(lambda: loaders(group), 30, "a loader")
    pid = loaders(group)[0]
    group.run("kill", "-STOP", pid)
    return pid
