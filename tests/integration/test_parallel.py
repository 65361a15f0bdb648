# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks, one engine process each: the cache gives each rank its shard and the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny
from daemons import Daemon
from transformers import AutoModelForCausalLM

import wcache
from wcache.errors import Miss
from wcache.model import MissReason, RankState

ENGINE = Path(__file__).parent.parent / "tp_llama.py"
TIMEOUT_S = 120


def group(directory: Path, rendezvous: Path, socket_dir: Path) -> list[dict[str, Any]]:
    """What the engine processes of a group of two say, in order of rank."""
    engines = [
        subprocess.Popen(
            [sys.executable, str(ENGINE), str(rank), "2", str(rendezvous), str(directory), str(socket_dir)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ENGINE.parent)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        answers = []
        for engine in engines:
            out, err = engine.communicate(timeout=TIMEOUT_S)
            assert engine.returncode == 0, err
            answers.append(json.loads(out.splitlines()[-1]))
        return answers
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()


@pytest.mark.parametrize("kind", ["llama-untied", "llama-tied"])
def test_two_ranks_from_the_cache_say_what_two_ranks_from_disk_say(
    make_daemon: Callable[..., Daemon], tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("WCACHE_STATE_DIR", str(short_dir / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tiny.save_split(kind, tmp_path / "model")
    config = {"model": str(directory), "dtype": "float32", "ranks": [0, 1], "parallel": {"tp_size": 2}}
    daemons = [make_daemon(rank=rank, config=config).start() for rank in range(2)]
    for daemon in daemons:
        daemon.wait_status(lambda s: s.state is RankState.READY, "ready", 60)

    answers = group(directory, tmp_path / "rendezvous", daemons[0].socket_dir)
    assert [a["source"] for a in answers] == ["cache", "cache"]
    assert all(a["cache"] == a["disk"] for a in answers)
    assert answers[0]["cache"]["digests"] != answers[1]["cache"]["digests"]
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    assert {tuple(a["cache"]["tokens"]) for a in answers} == {tuple(tiny.greedy(whole))}

    with pytest.raises(Miss) as e:  # rank 0's daemon is asked for the whole model
        wcache.attach(directory, dtype="float32", socket_path=daemons[0].path, fallback=False)
    assert e.value.reason is MissReason.LAYOUT
    assert {d.field for d in e.value.differences} == {"layout.tp_size"}
