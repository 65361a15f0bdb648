# SPDX-License-Identifier: Apache-2.0
"""A real daemon with weights on a real GPU: what it costs, how it dies, and what it proves when it is back."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from daemons import Daemon, Manager

from wcache.errors import ConnectionClosed
from wcache.host.gpu_memory import MIB, account, measure
from wcache.model import RankState, ShardState
from wcache.protocol.messages import Evict, Evicted, Verified, Verify

SIZES = [8 << 20, 1024, 300 << 20, 2048, 64 << 20, 4 << 20]
Spawn = Callable[..., Any]


def publish(spawn: Spawn, daemon: Daemon, gpu: str, name: str = "m") -> None:
    child = spawn("publish")
    child.ask(socket=str(daemon.path), gpu=gpu, name=name, sizes=SIZES)
    child.close()


def attach(spawn: Spawn, daemon: Daemon, gpu: str, name: str = "m", **more: Any) -> tuple[Any, dict[str, Any]]:
    child = spawn("attach")
    return child, child.ask(socket=str(daemon.path), gpu=gpu, name=name, **more)


GOOD = {"wrong": [], "tensors": len(SIZES), "daemon": True}


def test_a_daemon_that_holds_weights_takes_no_gpu_memory_itself(
    spawn: Spawn, daemon: Daemon, gpu: str, memory_comes_back: int, wait_until: Callable[..., None]
) -> None:
    publish(spawn, daemon, gpu)
    weights = daemon.status().shards[0].segment_bytes
    wait_until(lambda: abs(measure(gpu).used - memory_comes_back - weights) <= 2 * MIB, 10, "only the weights stay")
    assert daemon.pid not in [holder.pid for holder in measure(gpu).holders]
    assert account(measure(gpu), weights, ()).missing == 0


def test_killed_and_started_again_it_proves_and_serves_the_same_memory_while_an_engine_goes_on(
    spawn: Spawn, daemon: Daemon, manager: Manager, gpu: str
) -> None:
    publish(spawn, daemon, gpu)
    engine, first = attach(spawn, daemon, gpu)
    assert first == GOOD
    for _ in range(2):
        used = measure(gpu).used  # each round leaves one more engine
        daemon.kill()
        assert engine.ask() == {**GOOD, "daemon": False}
        assert abs(measure(gpu).used - used) <= 2 * MIB
        daemon.start()
        status = daemon.wait_status(lambda s: s.state is RankState.READY, "ready again", 60)
        assert [s.restored for s in status.shards] == [True]
        assert status.shards[0].verified is not None, "the checker has not proven the restored bytes"
        assert attach(spawn, daemon, gpu)[1] == GOOD
    assert engine.ask()["wrong"] == []


def test_verify_finds_a_byte_that_was_changed_and_the_shard_is_served_no_more(
    spawn: Spawn, daemon: Daemon, gpu: str
) -> None:
    publish(spawn, daemon, gpu)
    with daemon.connect() as admin:
        (good,) = admin.ask(Verify(), Verified).verdicts
    assert good.ok and good.bytes_checked >= sum(SIZES)
    assert attach(spawn, daemon, gpu, access="rw", spoil=True)[1]["wrong"] == []
    with daemon.connect() as admin:
        (bad,) = admin.ask(Verify(), Verified).verdicts
    assert not bad.ok and "segment 0" in bad.problem
    assert daemon.status().shards[0].state is ShardState.QUARANTINED
    assert attach(spawn, daemon, gpu)[1]["refused"] == "miss"


def test_a_restored_shard_whose_bytes_changed_is_not_served(spawn: Spawn, daemon: Daemon, gpu: str) -> None:
    publish(spawn, daemon, gpu)
    attach(spawn, daemon, gpu, access="rw", spoil=True)
    daemon.kill()
    daemon.start()
    status = daemon.wait_status(lambda s: s.state is RankState.READY, "ready again", 60)
    assert [s.state for s in status.shards] in ([], [ShardState.QUARANTINED])
    assert attach(spawn, daemon, gpu)[1]["refused"] == "miss"


def test_an_engine_on_another_gpu_is_refused_with_both_uuids(spawn: Spawn, daemon: Daemon, gpu: str) -> None:
    publish(spawn, daemon, gpu)
    other = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"
    _, answer = attach(spawn, daemon, other)
    assert (answer["refused"], answer["reason"]) == ("miss", "device")
    assert gpu in answer["message"] and other in answer["message"]


def test_evicting_frees_the_gpu_at_once_when_nobody_maps_and_later_when_somebody_does(
    spawn: Spawn, daemon: Daemon, gpu: str, memory_comes_back: int, wait_until: Callable[..., None]
) -> None:
    publish(spawn, daemon, gpu)
    with daemon.connect() as admin:
        admin.ask(Evict(), Evicted)
    wait_until(lambda: measure(gpu).used <= memory_comes_back + 2 * MIB, 10, "the memory is free")
    publish(spawn, daemon, gpu, "again")
    engine, _ = attach(spawn, daemon, gpu, "again")
    with daemon.connect() as admin:
        admin.ask(Evict(force=True), Evicted)
    assert engine.ask()["wrong"] == []
    assert measure(gpu).used >= memory_comes_back + sum(SIZES)
    engine.close()
    wait_until(lambda: measure(gpu).used <= memory_comes_back + 2 * MIB, 10, "the last engine freed it")


def test_a_publisher_that_is_killed_before_the_commit_leaves_nothing(
    spawn: Spawn, daemon: Daemon, gpu: str, memory_comes_back: int, wait_until: Callable[..., None]
) -> None:
    child = spawn("publish")
    with pytest.raises(ConnectionClosed):
        child.ask(socket=str(daemon.path), gpu=gpu, name="m", sizes=SIZES, die_before_commit=True)
    assert child.close() == -signal.SIGKILL
    assert daemon.status().shards == ()
    wait_until(lambda: measure(gpu).used <= memory_comes_back + 2 * MIB, 10, "the memory is free")
