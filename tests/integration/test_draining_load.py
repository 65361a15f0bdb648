# SPDX-License-Identifier: Apache-2.0
"""A rank drained during its first load has started; a load that fails says what the loader said, and whose fault."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from daemons import CHILD, Daemon, Manager

from wcache.model import RankState
from wcache.protocol.messages import Done, Drain, Reload
from wcache.weights.spec import preload_spec

STAND_IN = Path(CHILD).with_name("loader_child.py")
FAILED, MISCONFIGURED = 1, 2


@pytest.fixture
def make_rank(
    make_daemon: Callable[..., Daemon], manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Daemon]:
    """A rank with a configured model and a loader that is a command, or `loader_child.py` in a given mood."""
    from wcache.config import parse

    monkeypatch.setenv("PYTHONPATH", str(CHILD.parent))
    model = "/models/preload"
    spec = preload_spec(parse(f'model = "{model}"\nidentity = "trust"', "test"), 0)

    def make(how: str, *, command: list[str] | None = None) -> Daemon:
        daemon = make_daemon(manager=manager, config={"model": model, "identity": "trust"})
        daemon.loader = command or [sys.executable, str(STAND_IN), str(daemon.path), spec, how]
        return daemon

    return make


def says(*lines: str, status: int) -> list[str]:
    """A loader that logs lines as ours does, and ends."""
    return ["sh", "-c", f"printf '2026-11-30 03:54:47,927 %s\\n' {' '.join(repr(x) for x in lines)}; exit {status}"]


def ended(daemon: Daemon) -> int:
    assert daemon.process is not None
    return daemon.process.wait(20.0)


def test_a_rank_drained_during_its_first_load_has_started(
    make_rank: Callable[..., Daemon], manager: Manager, wait_until: Callable[..., None]
) -> None:
    daemon = make_rank("slow:60").start()
    wait_until(lambda: daemon.status().progress, 10.0, "the load is under way")
    with daemon.connect() as admin:
        assert admin.ask(Drain(deadline_s=10.0), Done).text == "0 shards freed"
    assert manager.wait_told("READY=1", 5.0) == "READY=1\nSTATUS=drained"
    time.sleep(0.5)
    assert not psutil.Process(daemon.pid).children()
    assert daemon.log.count("loading shard from disk") == 1
    assert " ready\n" not in daemon.log  # nobody's alarm should take it for that


def test_a_reload_after_such_a_drain_makes_it_ready_without_telling_systemd_twice(
    make_rank: Callable[..., Daemon], manager: Manager, wait_until: Callable[..., None]
) -> None:
    daemon = make_rank("slow:2").start()
    wait_until(lambda: daemon.status().progress, 10.0, "the load is under way")
    with daemon.connect() as admin:
        admin.ask(Drain(deadline_s=10.0), Done)
        manager.wait_told("READY=1", 5.0)
        admin.ask(Reload(), Done)
    daemon.wait_status(lambda s: s.state is RankState.READY, "the load after the reload")
    wait_until(lambda: " ready\n" in daemon.log, 5.0, "the log says so")
    assert len(manager.texts("READY=1")) == 1


def test_the_last_status_is_the_loaders_error_and_its_hint(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    said = says("INFO reading", "ERROR b.safetensors: no such file (checkpoint)", "ERROR hint: finish it", status=1)
    daemon = make_rank("", command=said).start(wait=False)
    assert ended(daemon) == FAILED
    line = "Weight load failed: the loader ended with exit status 1: b.safetensors: no such file; hint: finish it"
    assert manager.texts("STOPPING=1") == [f"STOPPING=1\nSTATUS={line}"]
    assert "INFO rank 0 loader: reading" in daemon.log
    assert "ERROR rank 0 loader: b.safetensors" in daemon.log
    assert "03:54:47,927" not in daemon.log


def test_a_silent_loader_that_is_killed_has_said_nothing(make_rank: Callable[..., Daemon]) -> None:
    daemon = make_rank("", command=["sh", "-c", "kill -9 $$"]).start(wait=False)
    assert ended(daemon) == FAILED
    assert "signal 9 (SIGKILL) and said nothing; the kernel may have been short of memory" in daemon.log


def test_a_configuration_that_the_loader_refuses_ends_the_daemon_for_good(make_rank: Callable[..., Daemon]) -> None:
    daemon = make_rank("", command=says("ERROR engine_args.x is wrong (config)", status=2)).start(wait=False)
    assert ended(daemon) == MISCONFIGURED


def test_what_is_resident_is_not_given_up_for_a_configuration(
    make_rank: Callable[..., Daemon], manager: Manager
) -> None:
    daemon = make_rank("good").start()
    manager.wait_told("READY=1")
    daemon.kill()
    daemon.config["dtype"] = "float16"  # what is restored is another configuration's
    daemon.loader = says("ERROR engine_args.x is wrong (config)", status=2)
    daemon.start(wait=False)
    assert ended(daemon) == FAILED
    assert len(manager.kept) == 3
