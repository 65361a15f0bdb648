# SPDX-License-Identifier: Apache-2.0
"""PyTorch engines on a real GPU through the public functions: zero copy, copy, cold start, publishing live tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, Manager

from wcache.host.gpu_memory import MIB, measure
from wcache.model import Origin

Spawn = Callable[..., Any]
CONTEXT_BYTES = 700 * MIB  # a process with a context and torch's own kernels
pytestmark = pytest.mark.keeps("torch's thread pool, which makes the checkpoint")


@pytest.fixture
def engine(spawn: Spawn, short_dir: Path, checkpoint: Path) -> Callable[..., Any]:
    """An engine on the checkpoint; its digest store is the daemon's."""

    def start() -> Any:
        child = spawn("engine", env={"WCACHE_STATE_DIR": str(short_dir / "state"), "XDG_CONFIG_HOME": str(short_dir)})

        def ask(how: str, **options: Any) -> dict[str, Any]:
            options.setdefault("device", "cuda:0")
            where = {"directory": str(checkpoint), "socket_dir": str(short_dir / "run")}
            return dict(child.ask(how=how, options=options, **where))

        ask.child = child  # type: ignore[attr-defined]
        return ask

    return start


@pytest.fixture
def preloaded(make_daemon: Callable[..., Daemon], manager: Manager, checkpoint: Path) -> Daemon:
    """A rank whose loader child has brought the checkpoint to the GPU."""
    daemon = make_daemon(model=str(checkpoint)).start()
    manager.wait_told("READY=1", 120)
    return daemon


def test_a_preloaded_rank_keeps_exactly_the_weights_and_engines_map_them(
    preloaded: Daemon, engine: Any, gpu: str, memory_comes_back: int, wait_until: Callable[..., None]
) -> None:
    shard = preloaded.status().shards[0]
    assert shard.origin is Origin.PRELOAD
    assert shard.segment_bytes - shard.weight_bytes <= shard.weight_bytes // 100
    kept = memory_comes_back + shard.segment_bytes
    wait_until(lambda: abs(measure(gpu).used - kept) <= 2 * MIB, 10, "only the weights stay")
    first, second = engine(), engine()
    for ask in (first, second):
        answer = ask("attach", fallback=False)
        assert (answer["wrong"], answer["own"], answer["on_gpu"]) == ([], True, True)
        assert (answer["source"], answer["mode"]) == ("cache", "zero_copy")
    assert measure(gpu).used <= kept + 2 * CONTEXT_BYTES, "an engine has a copy of its own"
    preloaded.kill()
    assert first("look")["wrong"] == second("look")["wrong"] == []


def test_a_killed_preloaded_rank_is_ready_again_without_loading(preloaded: Daemon, engine: Any) -> None:
    preloaded.kill()
    preloaded.start()
    status = preloaded.wait_status(lambda s: s.state == "ready", "ready again", 60)
    assert [s.restored for s in status.shards] == [True]
    assert preloaded.log.count("loading shard from disk") == 1
    assert engine()("attach", fallback=False)["wrong"] == []


def test_copy_mode_clones_and_frees_the_cache(preloaded: Daemon, engine: Any, gpu: str, memory_comes_back: int) -> None:
    weights = preloaded.status().shards[0].segment_bytes
    ask = engine()
    answer = ask("attach", mode="copy", fallback=False)
    assert (answer["wrong"], answer["mode"]) == ([], "copy")
    assert preloaded.status().shards == ()
    assert measure(gpu).used <= memory_comes_back + weights + CONTEXT_BYTES, "both copies are still there"
    preloaded.kill()
    assert ask("look")["wrong"] == []


def test_a_cold_engine_loads_once_and_the_next_one_maps(daemon: Daemon, engine: Any) -> None:
    first, second = engine(), engine()
    assert first("attach")["source"] == "disk"
    assert second("attach", fallback=False)["source"] == "cache"
    assert [s.origin for s in daemon.status().shards] == [Origin.ENGINE]
    first.child.close()
    assert second("look")["wrong"] == []


def test_live_parameters_are_published_and_moved_so_that_one_copy_stays(
    daemon: Daemon, engine: Any, gpu: str, memory_comes_back: int
) -> None:
    writer, reader = engine(), engine()
    answer = writer("publish")
    assert answer["wrong"] == []
    shard = daemon.status().shards[0]
    assert measure(gpu).used <= memory_comes_back + shard.segment_bytes + CONTEXT_BYTES, "the old copy was not freed"
    assert reader("attach", fallback=False)["wrong"] == []
    writer.child.kill()
    assert reader("look")["wrong"] == []
