# SPDX-License-Identifier: Apache-2.0
"""A running rank for each test, and comparison bit for bit of what two processes or two loads hold."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inotify
import pytest
import tqdm
import transformers
from daemons import Daemon

import wcache


@pytest.fixture(autouse=True, scope="session")
def no_progress_bars() -> None:
    """A bar starts a thread for the life of the process."""
    transformers.utils.logging.disable_progress_bar()
    tqdm.tqdm.monitor_interval = 0


@pytest.fixture
def short_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short name (a socket's path has at most 107 bytes), where this host's configuration is."""
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        monkeypatch.setenv("WCACHE_STATE_DIR", f"{name}/state")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield Path(name)


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running rank without a configured model."""
    return make_daemon().start()


@pytest.fixture
def load(daemon: Daemon) -> Callable[..., Any]:
    """`wcache.transformers.from_pretrained` with that rank."""

    def load(directory: Path, *arguments: Any, **options: Any) -> Any:
        return wcache.transformers.from_pretrained(directory, *arguments, socket_path=daemon.path, **options)

    return load


@pytest.fixture
def opened() -> Callable[[Path], object]:
    """Files of a directory that anybody opens while the block runs."""
    return inotify.opened
