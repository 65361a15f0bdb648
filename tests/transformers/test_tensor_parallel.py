# SPDX-License-Identifier: Apache-2.0
"""Two ranks of Transformers' tensor parallelism: each has its part from the cache, all attach or none does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_checkpoints as tiny
from daemons import Daemon
from torch import distributed

from wcache.engine.transformers import ranks
from wcache.errors import Miss
from wcache.model import Origin, RankState

CHILD = Path(__file__).with_name("tp_child.py")
TIMEOUT_S = 120
WARM: dict[str, Any] = {"fallback": False}


@pytest.fixture
def engine(short_dir: Path) -> Callable[..., list[dict[str, Any]]]:
    """What the two processes of an engine say, in order of rank; `starts`: options of each start, one after another."""

    def run(directory: Path, sockets: Path, *starts: dict[str, Any]) -> list[dict[str, Any]]:
        meeting = short_dir / f"meeting-{len(list(short_dir.glob('meeting-*')))}"
        command = [str(meeting), str(directory), str(sockets), json.dumps(starts)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(CHILD), str(rank), "2", *command],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(CHILD.parent.parent)},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            answers = []
            for process in processes:
                out, err = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 0, err[-4000:]
                answers.append(json.loads(out.splitlines()[-1]) | {"log": err})
            return answers
        finally:
            for process in processes:
                process.kill()
                process.communicate()

    return run


def sources(answers: list[dict[str, Any]]) -> list[list[str]]:
    return [[start["source"] for start in answer["starts"]] for answer in answers]


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_each_rank_has_its_part_from_the_cache(
    make_daemon: Callable[..., Daemon], short_dir: Path, engine: Callable[..., Any], name: str
) -> None:
    directory = tiny.save(name, short_dir / "model")
    config = {"ranks": [0, 1], "parallel": {"tp_size": 2}}
    daemons = [make_daemon(rank=rank, config=config).start() for rank in range(2)]
    answers = engine(directory, daemons[0].socket_dir, {"train": True}, {**WARM, "train": True})
    assert sources(answers) == [["disk", "cache"]] * 2
    assert answers[0]["digests"] != answers[1]["digests"]
    assert not any(start["trained"] for answer in answers for start in answer["starts"])
    for rank, daemon in enumerate(daemons):
        (shard,) = daemon.status().shards
        assert (shard.layout.tp_size, shard.layout.tp_rank) == (2, rank)


def test_a_rank_without_its_part_makes_all_load_and_gets_it_back(
    make_daemon: Callable[..., Daemon], short_dir: Path, engine: Callable[..., Any]
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    config = {"ranks": [0, 1], "parallel": {"tp_size": 2}}
    daemons = [make_daemon(rank=rank, config=config).start() for rank in range(2)]
    engine(directory, daemons[0].socket_dir, {})
    daemons[1].kill()
    daemons[1].start()
    answers = engine(directory, daemons[0].socket_dir, {}, WARM)
    assert sources(answers) == [["private", "cache"], ["disk", "cache"]]
    assert "rank 1 of this engine had a miss" in answers[0]["log"]


def test_what_the_ranks_preloaded_is_what_the_engine_asks_for(
    make_daemon: Callable[..., Daemon], short_dir: Path, engine: Callable[..., Any]
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    config = {"model": str(directory), "loader": "transformers", "ranks": [0, 1], "parallel": {"tp_size": 2}}
    daemons = [make_daemon(rank=rank, config=config).start() for rank in range(2)]
    for daemon in daemons:
        daemon.wait_status(lambda s: s.state in (RankState.READY, RankState.FAILED), "ready", timeout_s=90)
        assert [s.origin for s in daemon.status().shards] == [Origin.PRELOAD], daemon.log
    assert sources(engine(directory, daemons[0].socket_dir, WARM)) == [["cache"]] * 2


@pytest.mark.parametrize(
    ("sizes", "shared"),
    [
        ({"pp_size": 1, "fsdp_size": 1, "ep_size": 1}, True),
        ({"pp_size": 1, "fsdp_size": 1, "enable_expert_parallel": False}, True),  # before Transformers 5.19
        ({"pp_size": 1, "fsdp_size": 1, "enable_expert_parallel": True}, False),
        ({"pp_size": 1, "fsdp_size": 2, "ep_size": 1}, False),
    ],
)
def test_only_tensor_parallel_models_are_shared(short_dir: Path, sizes: dict[str, Any], shared: bool) -> None:
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=SimpleNamespace(tp_size=1, **sizes)))
    distributed.init_process_group("gloo", init_method=f"file://{short_dir}/meeting", rank=0, world_size=1)
    try:
        with nullcontext() if shared else pytest.raises(Miss, match="only tensor parallel"):
            assert ranks.group_of(model, SimpleNamespace(device_mesh="mesh")).size == 1
    finally:
        distributed.destroy_process_group()


def test_a_model_without_a_plan_is_not_put_whole_onto_each_rank(
    make_daemon: Callable[..., Daemon], short_dir: Path
) -> None:
    directory = tiny.save("mamba", short_dir / "model")
    config = {"model": str(directory), "loader": "transformers", "ranks": [0, 1], "parallel": {"tp_size": 2}}
    daemons = [make_daemon(rank=rank, config=config).start(wait=False) for rank in range(2)]
    for daemon in daemons:
        assert daemon.process is not None
        assert daemon.process.wait(timeout=90) != 0
    assert "MambaForCausalLM has no tp_plan to spread it over 2 ranks" in daemons[0].log
