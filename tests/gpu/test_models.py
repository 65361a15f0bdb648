# SPDX-License-Identifier: Apache-2.0
"""Modules and Transformers models on a real GPU: every tensor where it was, bit for bit, host memory included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon

Spawn = Callable[..., Any]


def test_what_a_module_keeps_in_host_memory_is_there_again_and_a_parameter_there_is_not_shared(
    spawn: Spawn, daemon: Daemon
) -> None:
    answer = spawn("modules").ask(socket=str(daemon.path))
    assert answer["places"] == {
        "inner.weight": "cuda:0", "inner.bias": "cuda:0", ".mask": "cuda:0", ".lengths": "cpu", ".scale": "cpu",
        ".tables.host": "cpu", ".tables.here": "cuda:0", ".made_by_loading": "cpu",
    }  # fmt: skip
    assert answer["away"] == "layout", "another shard is resident, and this one must not be"
    assert "weight cannot be published: it is on cpu" in daemon.log


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "mixtral", "qwen3-moe", "mamba", "gpt2"])
def test_a_transformers_model_is_the_one_from_disk(spawn: Spawn, daemon: Daemon, short_dir: Path, name: str) -> None:
    environment = {"WCACHE_STATE_DIR": str(short_dir / "state"), "XDG_CONFIG_HOME": str(short_dir)}
    child = spawn("pretrained", env=environment)
    answer = child.ask(socket=str(daemon.path), name=name, directory=str(short_dir / "model"))
    assert answer == {"sources": ["disk", "cache"], "same_tokens": True}
