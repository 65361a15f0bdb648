# SPDX-License-Identifier: Apache-2.0
"""Real daemons for every integration test; what they leave is cleaned up and their log shown when a test fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon, Manager, making


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        yield Path(name)


@pytest.fixture
def manager(short_dir: Path) -> Iterator[Manager]:
    """A notify socket with a fd store."""
    manager = Manager(short_dir / "notify")
    yield manager
    manager.close()


@pytest.fixture
def make_daemon(short_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Make (not start) daemons on one directory; all are ended after the test."""
    with making(short_dir) as make:
        yield make


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], manager: Manager) -> Daemon:
    """A running rank without a configured model, with a fd store."""
    return make_daemon(manager=manager).start()
