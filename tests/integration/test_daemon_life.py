# SPDX-License-Identifier: Apache-2.0
"""A rank's life: publish, attach, die, come back with everything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from daemons import Daemon, Manager, payload, publish, query, read

from wcache.errors import Busy, ConnectionClosed, Miss, NoSuchShard
from wcache.host.fds import close_all
from wcache.model import MissReason, Mode, RankState, ShardState
from wcache.protocol.connection import Connection
from wcache.protocol.messages import (
    Attach,
    Done,
    Evict,
    Evicted,
    GetStatus,
    Reattach,
    Release,
    Released,
    Status,
    Verified,
    Verify,
)

MAX_RSS = 60 << 20


def attach(connection: Connection, asked: object = None, mode: Mode = Mode.ZERO_COPY) -> list[bytes]:
    """Attach and read every segment."""
    _, manifest, fds = connection.attach(Attach(query=asked or query(), mode=mode))  # type: ignore[arg-type]
    with manifest:
        data = [read(fd, 5000) for fd in fds]
        close_all(fds)
    return data


EXPECTED = [payload(i, 5000) for i in range(2)]


def test_without_a_model_a_rank_is_ready_in_a_second_and_small(daemon: Daemon, manager: Manager) -> None:
    manager.wait_told("READY=1")
    status = daemon.status()
    assert status.state is RankState.READY
    assert 0 < status.rss < MAX_RSS


def test_ready_within_a_second(make_daemon: Callable[..., Daemon], manager: Manager) -> None:
    daemon = make_daemon(manager=manager)
    start = time.monotonic()
    daemon.start(wait=False)
    manager.wait_told("READY=1")
    assert time.monotonic() - start < 1.0


def test_what_one_engine_publishes_another_one_maps(daemon: Daemon) -> None:
    with daemon.connect("engine", "writer") as writer, daemon.connect("engine", "reader") as reader:
        publish(writer, query())
        assert attach(reader) == EXPECTED
        shard = daemon.status().shards[0]
        assert (shard.tensors, shard.weight_bytes, shard.segments) == (2, 10000, 2)
        assert [(lease.name, lease.pid) for lease in shard.leases] == [("reader", os.getpid())]
    assert "rank 0 exported 2 params" in daemon.log


def test_a_lease_ends_with_its_connection(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query())
    with daemon.connect("engine") as reader:
        attach(reader)
        with daemon.connect() as admin, pytest.raises(Busy, match="in use by test"):
            admin.ask(Evict(), Evicted)
    daemon.wait_status(lambda s: not s.shards[0].leases, "the lease ends")
    with daemon.connect() as admin:
        assert admin.ask(Evict(), Evicted).bytes_freed == 2 * 8192
    assert not daemon.status().shards


def test_kill_9_and_a_restart_bring_everything_back(daemon: Daemon, manager: Manager) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query("a"))
        publish(writer, query("b"))
    daemon.kill(signal.SIGKILL)
    start = time.monotonic()
    daemon.start()
    with daemon.connect("engine") as reader:
        assert attach(reader, query("a")) == EXPECTED
        assert attach(reader, query("b")) == EXPECTED
    assert time.monotonic() - start < 1.0
    status = daemon.wait_status(lambda s: all(x.verified for x in s.shards), "background verification")
    assert all(s.restored for s in status.shards)
    assert len(manager.names()) == 6


def test_an_engine_takes_its_lease_up_again_after_a_restart(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer:
        committed = publish(writer, query())
    daemon.kill()
    daemon.start()
    with daemon.connect("engine", "again") as engine:
        engine.ask(Reattach(fingerprint=committed.fingerprint, generation=committed.generation), Done)
        assert daemon.status().shards[0].leases[0].name == "again"


def test_after_a_restart_without_a_fd_store_an_old_generation_is_gone(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    with daemon.connect("engine") as writer:
        old = publish(writer, query())
    daemon.kill()
    daemon.start()
    with daemon.connect("engine") as engine:
        publish(engine, query())
        with pytest.raises(Miss) as missed:
            engine.ask(Reattach(fingerprint=old.fingerprint, generation=old.generation), Done)
    assert missed.value.reason is MissReason.GENERATION_GONE


@pytest.mark.parametrize("lost", ["manifest", "seg"])
def test_a_partial_set_is_dropped_and_leaves_the_fd_store(daemon: Daemon, manager: Manager, lost: str) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query())
    daemon.kill()
    victim = next(i for i, (name, _) in enumerate(manager.kept) if name.startswith(lost))
    manager.kept.pop(victim)[1].close()
    daemon.start()
    assert not daemon.status().shards
    manager.wait(lambda: not manager.kept, "the fd store is emptied")


def test_evict_takes_the_shard_out_of_the_fd_store(daemon: Daemon, manager: Manager) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query())
    assert len(manager.names()) == 3
    with daemon.connect() as admin:
        admin.ask(Evict(), Evicted)
        assert manager.names() == []
        with pytest.raises(NoSuchShard):
            admin.ask(Evict(fingerprint="ab"), Evicted)


def test_evict_by_force_tells_the_engine_by_closing_its_connection(daemon: Daemon) -> None:
    with daemon.connect("engine") as engine, daemon.connect() as admin:
        publish(engine, query())
        attach(engine)
        admin.ask(Evict(force=True), Evicted)
        daemon.wait_status(lambda s: not s.shards, "evicted")
        with pytest.raises(ConnectionClosed):
            engine.ask(GetStatus(), Status)


def test_copy_mode_frees_the_shard_only_when_nobody_else_holds_it(daemon: Daemon) -> None:
    with daemon.connect("engine") as one, daemon.connect("engine") as two:
        shard = publish(one, query()).fingerprint
        attach(one)
        attach(two, mode=Mode.COPY)
        assert two.ask(Release(fingerprint=shard, evict=True), Released) == Released(evicted=False, holders=1)
        one.ask(Release(fingerprint=shard), Released)
        attach(two, mode=Mode.COPY)
        assert two.ask(Release(fingerprint=shard, evict=True), Released) == Released(evicted=True, holders=0)
    assert not daemon.status().shards


def test_a_wrong_digest_quarantines_the_shard(daemon: Daemon, manager: Manager) -> None:
    with daemon.connect("engine") as engine, daemon.connect() as admin:
        publish(engine, query("good"))
        publish(engine, query("bad"), spoil=True)
        verdicts = {v.ok: v for v in admin.ask(Verify(), Verified).verdicts}
        assert "segment 1" in verdicts[False].problem
        with pytest.raises(Miss) as missed:
            attach(engine, query("bad"))
        assert missed.value.reason is MissReason.QUARANTINED
        assert attach(engine, query("good")) == EXPECTED
    states = sorted(s.state for s in daemon.status().shards)
    assert states == [ShardState.QUARANTINED, ShardState.RESIDENT]
    assert len(manager.names()) == 3
    with daemon.connect("engine") as engine:
        publish(engine, query("bad"))
        assert attach(engine, query("bad")) == EXPECTED


def test_sigterm_keeps_the_fd_store_and_says_stopping(daemon: Daemon, manager: Manager) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query())
    assert daemon.stop() == 0
    assert manager.texts("STOPPING=1")
    assert len(manager.names()) == 3
    assert not daemon.path.exists()


def test_hundreds_of_attaches_leave_nothing_behind(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query())
    before = daemon.fds()
    for _ in range(300):
        with daemon.connect("engine") as engine:
            attach(engine)
    daemon.wait_status(lambda s: daemon.fds() <= before + 3 and not s.shards[0].leases, "descriptors return")
