# SPDX-License-Identifier: Apache-2.0
"""Nothing of ours warns: whole engines, from the first import to the last tensor, under `python -W error`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import tiny_checkpoints as tiny
from daemons import Daemon

from wcache.model import RankState

CHILD = Path(__file__).with_name("strict_child.py")


def test_engines_raise_no_warning(daemon: Daemon, short_dir: Path) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(CHILD), str(directory), str(daemon.path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "no warnings"
    assert "Warning" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_rank_and_its_loader_raise_no_warning(short_dir: Path, make_daemon: Callable[..., Daemon]) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    config = {"model": str(directory), "loader": "transformers"}
    daemon = make_daemon(config=config, environment={"PYTHONWARNINGS": "error"}).start()
    daemon.wait_status(lambda s: s.state in (RankState.READY, RankState.FAILED), "ready", timeout_s=60)
    assert daemon.status().shards, daemon.log
    assert "Warning" not in daemon.log
