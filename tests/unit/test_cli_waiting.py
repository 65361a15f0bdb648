# SPDX-License-Identifier: Apache-2.0
"""Watching ranks while the service manager works on a job."""

from __future__ import annotations

import pytest

from wcache.cli import waiting
from wcache.cli.context import Context
from wcache.cli.ranks import GroupReport, RankReport
from wcache.errors import SystemdError
from wcache.host.units import Unit


def report(state: str) -> GroupReport:
    rank = RankReport(rank=0, state=state, ready=state == "ready", device="cpu")
    return GroupReport(manager=None, model=None, ready=int(rank.ready), total=1, ranks=(rank,))


def test_a_manager_that_does_not_answer_in_time_ends_no_watch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([report("loading"), SystemdError("did not answer"), report("ready")])

    def look(*_: object) -> GroupReport:
        seen = next(looks)
        if isinstance(seen, SystemdError):
            raise seen
        return seen

    monkeypatch.setattr(waiting, "look", look)
    waiting.watch(Context(), (0,), lambda seen: seen is not None and seen.all_ready, pause=lambda _: None)
    assert capsys.readouterr().err.splitlines() == ["rank 0: loading", "rank 0: ready"]


def test_a_rank_that_is_silent_once_is_just_being_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter(map(report, ["ready", "unresponsive", "loading", "unresponsive", "unresponsive", "ready"]))
    monkeypatch.setattr(waiting, "look", lambda *_: next(looks))
    left = iter(range(6))
    waiting.watch(Context(), (0,), lambda _: next(left) == 5, pause=lambda _: None)
    said = [line.removeprefix("rank 0: ") for line in capsys.readouterr().err.splitlines()]
    assert said == ["ready", "loading", "unresponsive", "ready"]


def test_a_failure_between_two_looks_is_noted_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, wait_until: object
) -> None:
    failed = Unit(
        "wcache@3.service", "loaded", "activating", "auto-restart", "exit-code", exit_status=1, text="no room"
    )
    monkeypatch.setattr(waiting, "look_at_units", lambda *_: {failed.name: failed})
    monkeypatch.setattr(waiting, "FAILURE_POLL_S", 0.001)
    with waiting.failures(Context(), (3,)) as noted:
        assert callable(wait_until)
        wait_until(lambda: noted, 10.0, "the failure")
    assert noted == {3: "exited with status 1 (no room)"}
