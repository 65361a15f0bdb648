# SPDX-License-Identifier: Apache-2.0
"""A rank gets its configured weights, says truthfully how far it is, and ends loudly when it cannot have them."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from daemons import CHILD, Daemon, Manager, content_of, query, read

from wcache import config as configuration
from wcache.errors import Busy, Miss, NoSuchShard
from wcache.host.fds import close_all
from wcache.model import MissReason, Origin, RankState
from wcache.protocol.messages import (
    Attach,
    Done,
    Drain,
    Evict,
    Evicted,
    Explain,
    Explained,
    GetStatus,
    Pending,
    Reload,
    Status,
    Verified,
    Verify,
)
from wcache.weights.spec import preload_spec

LOADER = Path(CHILD).with_name("loader_child.py")
EXIT_FAILED = 1


@pytest.fixture
def make_rank(
    make_daemon: Callable[..., Daemon], short_dir: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Daemon]]:
    """A rank with a configured model and a stand-in loader that behaves in a given way."""
    monkeypatch.setenv("PYTHONPATH", str(CHILD.parent))

    def make(how: str, text: str = "preload", *, spec: str | None = None, **config: object) -> Daemon:
        settings = {"model": "/models/preload", "identity": "trust", **config}
        daemon = make_daemon(manager=manager, config=settings)
        set_loader(daemon, how, text, spec)
        return daemon

    yield make


def set_loader(daemon: Daemon, how: str, text: str = "preload", spec: str | None = None) -> None:
    if spec is None:
        plain = {k: v for k, v in daemon.config.items() if not isinstance(v, dict)}
        toml = "".join(f"{k} = {json.dumps(v)}\n" for k, v in plain.items())
        spec = preload_spec(configuration.parse(toml, "test"), 0)
    daemon.loader = [sys.executable, str(LOADER), str(daemon.path), spec, how, text]


def attach(daemon: Daemon, text: str = "preload", wait_s: float = 0.0) -> list[bytes]:
    with daemon.connect("engine") as engine:
        _, manifest, fds = engine.attach(Attach(query=query(text), wait_s=wait_s))
        data = [read(fd, 5000) for fd in fds]
        close_all([manifest, *fds])
        return data


def children(daemon: Daemon) -> list[psutil.Process]:
    return psutil.Process(daemon.pid).children(recursive=True)


def test_ready_comes_once_and_only_when_the_weights_are_resident(
    make_rank: Callable[..., Daemon], manager: Manager
) -> None:
    daemon = make_rank("slow:2").start()
    assert daemon.status().state is RankState.LOADING
    assert not manager.texts("READY=1")
    assert len(attach(daemon, wait_s=20.0)) == 2  # an engine that waits reads nothing from disk
    manager.wait_told("READY=1")
    status = daemon.status()
    assert (status.state, status.shards[0].origin) == (RankState.READY, Origin.PRELOAD)
    for line in ("rank 0 loading shard from disk", "rank 0 exported 2 params", "ready"):
        assert line in daemon.log
    assert len(manager.texts("READY=1")) == 1


def test_status_follows_the_load(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("slow:3").start()
    manager.wait_told("READY=1")
    texts = [t for t in manager.texts("STATUS=loading ")]
    assert any("3/10 files, 1.9 GB/s" in t for t in texts)
    percent = [int(t.split()[1]) for t in texts if "%" in t]
    assert len(percent) >= 3
    assert percent == sorted(percent)
    assert daemon.status().progress is None


def test_extensions_follow_progress(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    make_rank("slow:4", timeouts={"stall_s": 4.0}).start()
    manager.wait_told("READY=1")
    times = [t.at for t in manager.told if t.text.startswith("EXTEND_TIMEOUT_USEC=4000000")]
    assert len(times) >= 3
    assert all(b - a < 4.0 for a, b in itertools.pairwise(times))


def test_a_stalled_load_is_no_longer_vouched_for_and_ends(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("stall", timeouts={"stall_s": 2.0}).start()
    start = time.monotonic()
    assert daemon.process is not None
    assert daemon.process.wait(20.0) == EXIT_FAILED
    extensions = [t.at for t in manager.told if t.text.startswith("EXTEND")]
    assert len(extensions) == 1
    assert extensions[0] - start < 2.0
    assert "Weight load failed: the loader made no progress for 4 s" in daemon.log
    assert not manager.texts("READY=1")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("crash", "exit status 3"),
        ("crash", "tensor lm_head.weight is cursed"),
        ("kill", "signal 9 (SIGKILL)"),
        ("nothing", "published nothing"),
    ],
)
def test_a_failed_load_ends_the_daemon_with_its_reason(
    make_rank: Callable[..., Daemon], manager: Manager, how: str, words: str
) -> None:
    daemon = make_rank(how).start(wait=False)
    assert daemon.process is not None
    assert daemon.process.wait(20.0) == EXIT_FAILED
    assert "Weight load failed" in daemon.log
    assert words in daemon.log
    assert manager.kept == []
    assert not daemon.path.exists()


def test_a_loader_dies_with_its_daemon(make_rank: Callable[..., Daemon], wait_until: Callable[..., None]) -> None:
    daemon = make_rank("hang").start()
    wait_until(lambda: "loader: hang" in daemon.log, 10.0, "the loader runs")
    (loader,) = children(daemon)
    daemon.kill(signal.SIGKILL)
    wait_until(lambda: not loader.is_running() or loader.status() == "zombie", 5.0, "the loader is gone")


def test_sigterm_ends_a_load_at_once(make_rank: Callable[..., Daemon], wait_until: Callable[..., None]) -> None:
    daemon = make_rank("hang").start()
    wait_until(lambda: "loader: hang" in daemon.log, 10.0, "the loader runs")
    (loader,) = children(daemon)
    start = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - start < 3.0
    assert not loader.is_running()


def test_a_restarted_daemon_adopts_what_matches_without_a_loader(
    make_rank: Callable[..., Daemon], manager: Manager
) -> None:
    daemon = make_rank("good", identity="content").start()  # the directory is not there: unreachable
    manager.wait_told("READY=1")
    daemon.kill()
    manager.told.clear()
    set_loader(daemon, "crash")
    start = time.monotonic()
    daemon.start(wait=False)
    manager.wait_told("READY=1")
    assert time.monotonic() - start < 1.5
    status = daemon.status()
    assert status.state is RankState.READY
    assert status.shards[0].restored
    assert "cannot be read" in status.problem
    assert len(attach(daemon)) == 2


def test_a_restored_shard_of_another_spec_is_replaced_beside_it(
    make_rank: Callable[..., Daemon], manager: Manager
) -> None:
    daemon = make_rank("good", "old", spec="other").start()
    manager.wait_told("READY=1")
    daemon.kill()
    set_loader(daemon, "slow:1", "new")
    daemon.start()
    with daemon.connect("engine") as engine:
        _, manifest, fds = engine.attach(Attach(query=query("old")))  # still served while the new one loads
        close_all([manifest, *fds])
        daemon.wait_status(lambda s: s.state is RankState.READY, "the new shard")
        assert {s.content for s in daemon.status().shards} == {content_of("old"), content_of("new")}
    daemon.wait_status(lambda s: [x.content for x in s.shards] == [content_of("new")], "the old shard goes")
    manager.wait(lambda: len(manager.kept) == 3, "the old shard leaves the fd store")


def test_what_an_engine_published_satisfies_a_loader_that_finds_it(
    make_rank: Callable[..., Daemon], manager: Manager
) -> None:
    daemon = make_rank("good", spec="other").start()
    manager.wait_told("READY=1")
    daemon.kill()
    manager.told.clear()
    set_loader(daemon, "good")  # another spec, same fingerprint: answered by Resident
    daemon.start()
    manager.wait_told("READY=1")
    assert len(daemon.status().shards) == 1


def test_reload_reads_anew_and_frees_the_old_shard(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("good").start()
    manager.wait_told("READY=1")
    before = daemon.status().shards[0].generation
    with daemon.connect() as admin:
        admin.ask(Reload(), Done)
    status = daemon.wait_status(lambda s: s.shards and s.shards[0].generation != before, "the new generation")
    assert len(status.shards) == 1
    assert len(manager.kept) == 3


def test_reload_beside_a_shard_in_use_switches_when_it_is_done(
    make_rank: Callable[..., Daemon], manager: Manager
) -> None:
    daemon = make_rank("good").start()
    manager.wait_told("READY=1")
    with daemon.connect("engine") as engine, daemon.connect() as admin:
        hit, manifest, fds = engine.attach(Attach(query=query("preload")))
        close_all([manifest, *fds])
        admin.ask(Reload(), Done)
        daemon.wait_status(lambda s: len(s.shards) == 2, "the new one beside the old one")
        with daemon.connect("engine") as second:
            again, manifest, fds = second.attach(Attach(query=query("preload")))
            close_all([manifest, *fds])
        assert again.generation > hit.generation
    daemon.wait_status(lambda s: len(s.shards) == 1, "the old one goes with its last lease")


def test_a_failed_reload_keeps_an_older_matching_shard(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("good").start()
    manager.wait_told("READY=1")
    daemon.kill()
    set_loader(daemon, "crash")
    daemon.start()
    with daemon.connect("engine") as engine, daemon.connect() as admin:
        _, manifest, fds = engine.attach(Attach(query=query("preload")))
        close_all([manifest, *fds])
        admin.ask(Reload(), Done)
        status = daemon.wait_status(lambda s: "load failed" in s.problem, "the failure is told")
    assert status.state is RankState.READY
    assert len(attach(daemon)) == 2


def test_reload_without_a_model_is_refused(daemon: Daemon) -> None:
    with daemon.connect() as admin, pytest.raises(NoSuchShard, match="no model is configured"):
        admin.ask(Reload(), Done)


def test_a_quarantined_preload_is_loaded_anew(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("good").start()
    manager.wait_told("READY=1")
    daemon.kill()
    spoil(manager)
    daemon.start()
    with daemon.connect() as admin:
        admin.ask(Verify(), Verified)
    status = daemon.wait_status(lambda s: s.state is RankState.READY, "loaded anew")
    assert [x.state for x in status.shards] == ["resident"]
    assert "quarantined" in daemon.log


def spoil(manager: Manager) -> None:
    """Swap a stored segment for another of its size, as no fault of memory could."""
    from wcache.weights.segment_host import HostBackend

    index = next(i for i, (name, _) in enumerate(manager.kept) if name.endswith(".0"))
    name, fd = manager.kept[index]
    fd.close()
    segment = HostBackend().create("spoilt", 5000)
    manager.kept[index] = (name, segment.seal())


def test_status_and_misses_are_answered_during_a_load(make_rank: Callable[..., Daemon]) -> None:
    daemon = make_rank("slow:3").start()
    slowest = 0.0
    with daemon.connect("engine") as engine:
        for _ in range(50):
            start = time.monotonic()
            assert engine.ask(GetStatus(), Status).status.state is RankState.LOADING
            slowest = max(slowest, time.monotonic() - start)
        assert slowest < 0.2
        assert engine.ask(Explain(query=query("preload")), Explained).reason is MissReason.LOADING
        pending: list[Pending] = []
        with pytest.raises(Miss) as missed:
            engine.attach(Attach(query=query("preload"), wait_s=1.8), on_pending=pending.append)
    assert missed.value.reason is MissReason.DEADLINE
    assert pending
    status = daemon.status()
    assert status.misses == {"deadline": 1}
    assert status.last_miss is not None
    assert status.last_miss.engine == "test"


def test_drain_waits_for_leases_then_empties_everything(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("good").start()
    manager.wait_told("READY=1")
    with daemon.connect() as admin:
        with daemon.connect("engine", "holder") as engine:
            _, manifest, fds = engine.attach(Attach(query=query("preload")))
            close_all([manifest, *fds])
            with pytest.raises(Busy, match="holder"):
                admin.ask(Drain(deadline_s=0.3), Done)
            assert len(attach(daemon)) == 2  # the drain was given up
            states: list[object] = []

            def look(_: Pending) -> None:
                with pytest.raises(Miss) as missed:
                    attach(daemon)
                states.append(missed.value.reason)
                engine.close()

            admin.ask(Drain(deadline_s=20.0), Done, on_pending=look)
        assert states == [MissReason.DRAINING]
        manager.wait(lambda: not manager.kept, "the fd store is empty")
        status = daemon.status()
        assert (status.state, status.text) == (RankState.DRAINING, "drained")
        admin.ask(Reload(), Done)
    daemon.wait_status(lambda s: s.state is RankState.READY, "a reload ends the drain")


def test_an_evicted_preload_is_not_loaded_again_by_itself(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("good").start()
    manager.wait_told("READY=1")
    with daemon.connect() as admin:
        admin.ask(Evict(), Evicted)
    status = daemon.status()
    assert status.state is RankState.READY
    assert "evicted" in status.text
    assert daemon.log.count("loading shard from disk") == 1


def test_the_watchdog_is_fed_during_a_load(make_rank: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_rank("slow:3")
    daemon.watchdog_usec = 1_000_000
    daemon.start()
    manager.wait_told("READY=1")
    times = [t.at for t in manager.told if t.text == "WATCHDOG=1"]
    assert len(times) >= 4
    assert all(b - a < 1.0 for a, b in itertools.pairwise(times))


def test_an_unused_shard_of_another_configuration_makes_room(
    make_rank: Callable[..., Daemon], manager: Manager
) -> None:
    daemon = make_rank("good", "old", spec="other").start()
    manager.wait_told("READY=1")
    daemon.kill()
    manager.told.clear()
    set_loader(daemon, "tight", "new")
    daemon.start()
    manager.wait_told("READY=1")
    assert "made room" in daemon.log
    assert [s.content for s in daemon.status().shards] == [content_of("new")]
    assert len(manager.names()) == 3


def test_a_drain_ends_a_load_and_a_reload_begins_it_again(
    make_rank: Callable[..., Daemon], wait_until: Callable[..., None]
) -> None:
    daemon = make_rank("slow:60").start()
    wait_until(lambda: daemon.status().progress, 10.0, "the load is under way")
    with daemon.connect() as admin:
        admin.ask(Drain(deadline_s=10.0), Done)
        wait_until(lambda: not children(daemon), 5.0, "the loader is gone")
        assert daemon.status().state is RankState.DRAINING
        admin.ask(Reload(), Done)
    wait_until(lambda: daemon.status().progress, 10.0, "a load is under way again")


def test_loads_take_turns_when_slots_are_few(make_rank: Callable[..., Daemon], wait_until: Callable[..., None]) -> None:
    group = {"load_slots": 1, "ranks": [0, 1], "parallel": {"dp_size": 2}}
    first, second = make_rank("hang", spec="x", **group), make_rank("crash", spec="x", **group)
    second.rank = 1
    first.start()
    wait_until(lambda: "rank 0 loading shard" in first.log, 10.0, "the first one loads")
    second.start()
    assert second.status().state is RankState.LOADING
    assert "rank 1 loading shard" not in second.log
    first.kill()  # whoever held the slot is gone: it is free
    wait_until(lambda: "rank 1 loading shard" in second.log, 10.0, "the second one's turn")
