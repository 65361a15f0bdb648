# SPDX-License-Identifier: Apache-2.0
"""`loader = "transformers"`: a rank preloads through Transformers, and an engine with the same arguments is warm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equality
import pytest
import tiny_checkpoints as tiny
import transformers
from daemons import Daemon, Manager

import wcache
from wcache.model import Origin, RankState


def preload(directory: Path, **config: Any) -> dict[str, Any]:
    return {"model": str(directory), "loader": "transformers", **config}


def warm(daemon: Daemon, directory: Path, **options: Any) -> Any:
    return wcache.transformers.from_pretrained(directory, socket_path=daemon.path, fallback=False, **options)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"dtype": "float32"}, {"dtype": "float32"}),
        (
            {"engine_args": {"auto_class": "AutoModel", "attn_implementation": "eager"}},
            {"auto_class": "AutoModel", "attn_implementation": "eager"},
        ),
    ],
    ids=["defaults", "dtype", "arguments"],
)
def test_an_engine_finds_what_the_rank_preloaded(
    short_dir: Path, make_daemon: Callable[..., Daemon], config: dict[str, Any], options: dict[str, Any]
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    daemon = make_daemon(config=preload(directory, **config)).start()
    status = daemon.wait_status(lambda s: s.state in (RankState.READY, RankState.FAILED), "ready", timeout_s=60)
    assert [s.origin for s in status.shards] == [Origin.PRELOAD], daemon.log
    auto = getattr(transformers, options.get("auto_class", "AutoModelForCausalLM"))
    rest = {k: v for k, v in options.items() if k != "auto_class"}
    equality.same(warm(daemon, directory, **options), auto.from_pretrained(directory, **rest))


def test_a_restarted_rank_takes_its_model_back_without_a_loader(
    short_dir: Path, make_daemon: Callable[..., Daemon]
) -> None:
    manager = Manager(short_dir / "notify")
    try:
        directory = tiny.save("llama-tied", short_dir / "model")
        daemon = make_daemon(config=preload(directory), manager=manager).start()
        daemon.wait_status(lambda s: s.state is RankState.READY, "ready", timeout_s=60)
        daemon.kill()
        daemon.start().wait_status(lambda s: s.state is RankState.READY, "ready again", timeout_s=60)
        assert daemon.log.count("loading shard from disk") == 1
        warm(daemon, directory)
    finally:
        daemon.close()
        manager.close()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"parallel": {"pp_size": 2}}, "by tensor parallelism only"),
        ({"engine_args": {"tp_plan": "auto"}}, "engine_args.tp_plan is decided by parallel.tp_size"),
        ({"engine_args": {"device_map": "auto"}}, "engine_args.device_map is decided by devices"),
        ({"engine_args": {"dtype": "float32"}}, "engine_args.dtype is decided by dtype"),
        ({"engine_args": {"auto_class": "AutoModelForNothing"}}, "AutoModelForNothing"),
        ({"engine_args": {"auto_class": "AutoModelForSequenceClassification"}}, "Transformers made them up"),
    ],
    ids=["pipeline", "tp-plan", "device-map", "taken", "class", "invented"],
)
def test_what_cannot_be_preloaded_fails_the_rank_with_the_reason(
    short_dir: Path, make_daemon: Callable[..., Daemon], config: dict[str, Any], why: str
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    daemon = make_daemon(config=preload(directory, **config)).start(wait=False)
    assert daemon.process is not None
    assert daemon.process.wait(timeout=60) != 0
    assert why in daemon.log
