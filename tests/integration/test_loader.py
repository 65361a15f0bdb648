# SPDX-License-Identifier: Apache-2.0
"""The loader child against a real rank: it publishes once, reads nothing that is resident, and says what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
from daemons import Daemon

from wcache.model import Origin


@pytest.fixture
def load(daemon: Daemon, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the loader on a configuration (lines of TOML) for a rank that has none of its own."""

    def run(*lines: str) -> subprocess.CompletedProcess[str]:
        config = tmp_path / "load.toml"
        config.write_text("\n".join((f'state_dir = "{daemon.directory / "state"}"', *lines)))
        command = [sys.executable, "-m", "wcache.engine.loader", "--rank", "0", "--socket", str(daemon.path)]
        return subprocess.run(
            [*command, "--config", str(config)], capture_output=True, text=True, timeout=120,
            env={k: v for k, v in os.environ.items() if k != "WCACHE_STATE_DIR"},
        )  # fmt: skip

    return run


def test_a_load_is_published_and_a_second_one_reads_nothing(
    daemon: Daemon, load: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory = tiny.save_split("llama-untied", tmp_path / "model")
    done = load(f'model = "{directory}"')
    assert done.returncode == 0, done.stderr
    (shard,) = daemon.status().shards
    assert shard.origin is Origin.PRELOAD
    assert shard.leases == ()
    again = load(f'model = "{directory}"')
    assert again.returncode == 0, again.stderr
    assert "already resident: nothing to read" in again.stderr
    assert daemon.status().shards == (shard,)
    for path in directory.glob("*.safetensors"):
        os.utime(path)  # stamps moved, bytes did not: hashed, not loaded
    touched = load(f'model = "{directory}"')
    assert "already resident: nothing to read" in touched.stderr
    assert daemon.status().shards == (shard,)


def test_a_broken_checkpoint_ends_with_one_line_and_nothing_resident(
    daemon: Daemon, load: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory = tiny.save_split("llama-untied", tmp_path / "model")
    victim = sorted(directory.glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-16])
    done = load(f'model = "{directory}"')
    assert done.returncode == 1
    assert victim.name in done.stderr
    assert "Traceback" not in done.stderr
    assert daemon.status().shards == ()
    assert daemon.status().progress is None, "no publication is under way"


def test_a_loader_that_does_not_fit_the_model_says_so(
    daemon: Daemon, load: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory = tiny.save_split("llama-untied", tmp_path / "model")
    done = load(f'model = "{directory}"', "[parallel]", "tp_size = 3")
    assert done.returncode == 1
    assert "3" in done.stderr
    assert "Traceback" not in done.stderr
    assert load().returncode == 2, "no model is configured"
    assert daemon.status().shards == ()
