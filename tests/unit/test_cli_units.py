# SPDX-License-Identifier: Apache-2.0
"""`systemctl` as wcache drives it: a program on PATH stands in for it, everything else is real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wcache.config import Scope
from wcache.errors import SystemdError
from wcache.host import units

SHOWN = """\
Id=wcache@3.service
LoadState=loaded
ActiveState=activating
SubState=auto-restart
Result=signal
MainPID=0
StatusText=loading 31 %, 12/66 files = so far
NRestarts=2
NFileDescriptorStore=5
FileDescriptorStoreMax=4096
NeedDaemonReload=yes
ExecMainCode=2
ExecMainStatus=9

Id=wcache.target
LoadState=not-found
ActiveState=inactive
SubState=dead
"""


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in: says what `answer` holds, notes its arguments in `asked`, ends as `status` says."""
    program = tmp_path / "systemctl"
    program.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\necho "$@" >>asked\ncat answer\ncat complaint >&2 2>/dev/null\n'
        'exit "$(cat status 2>/dev/null || echo 0)"\n'
    )
    program.chmod(0o755)
    (tmp_path / "answer").write_text(SHOWN)
    (tmp_path / "complaint").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_all_units_are_shown_by_one_call(systemctl: Path) -> None:
    seen = units.show(Scope.USER, ["wcache@3.service", "wcache.target"])
    (asked,) = (systemctl / "asked").read_text().splitlines()
    assert asked.startswith("--user --no-ask-password --no-pager show ")
    rank = seen["wcache@3.service"]
    assert (rank.rank, rank.restarts, rank.stored_fds, rank.max_stored_fds, rank.stale) == (3, 2, 5, 4096, True)
    assert rank.text == "loading 31 %, 12/66 files = so far"
    assert rank.restarting and not rank.up
    assert not seen["wcache.target"].exists and seen["wcache.target"].rank is None


def test_a_refusal_carries_what_systemctl_said(systemctl: Path) -> None:
    (systemctl / "status").write_text("1")
    (systemctl / "complaint").write_text("Access denied\n")
    with pytest.raises(SystemdError, match="systemctl show: Access denied"):
        units.show(Scope.SYSTEM, ["wcache.target"])
    assert not units.installed(Scope.SYSTEM)


def test_a_manager_without_our_target_does_not_have_our_units(systemctl: Path) -> None:
    assert not units.installed(Scope.SYSTEM)
    (systemctl / "answer").write_text("Id=wcache.target\nLoadState=loaded\n")
    assert units.installed(Scope.SYSTEM)


def test_the_manager_that_has_our_units_is_found_the_users_own_first(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemctl / "answer").write_text("Id=wcache.target\nLoadState=loaded\n")
    monkeypatch.setattr(units, "reachable", lambda _: True)
    monkeypatch.setattr(units, "default_scope", lambda: Scope.USER)
    assert units.managing_scope() is Scope.USER
    monkeypatch.setattr(units, "reachable", lambda scope: scope is Scope.SYSTEM)
    assert units.managing_scope() is Scope.SYSTEM
    monkeypatch.setattr(units, "reachable", lambda _: False)
    assert units.managing_scope() is None


def test_a_job_is_waited_for_and_its_failure_told(systemctl: Path) -> None:
    with units.job(Scope.SYSTEM, "start", ["wcache@0.service"]) as job:
        assert job.done(10.0)
        assert job.problem() == ""
    (systemctl / "status").write_text("1")
    (systemctl / "complaint").write_text("Job for wcache@0.service failed.\n")
    with units.job(Scope.SYSTEM, "start", ["wcache@0.service"]) as job:
        assert job.done(10.0)
        assert job.problem() == "Job for wcache@0.service failed."


def test_a_job_that_is_given_up_leaves_no_process(systemctl: Path) -> None:
    (systemctl / "systemctl").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(KeyboardInterrupt), units.job(Scope.SYSTEM, "start", ["wcache.target"]) as job:
        assert not job.done(0.0)
        raise KeyboardInterrupt


def test_a_manager_that_hangs_is_an_error_not_a_wait(systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemctl / "systemctl").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(units, "SHOW_TIMEOUT_S", 0.2)
    with pytest.raises(SystemdError, match="did not answer within"):
        units.show(Scope.SYSTEM, ["wcache.target"])


def test_without_systemctl_there_is_no_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert units.version() is None
    with pytest.raises(SystemdError, match="systemctl: No such file"):
        units.show(Scope.SYSTEM, ["wcache.target"])
