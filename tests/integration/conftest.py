# SPDX-License-Identifier: Apache-2.0
"""A real daemon for every integration test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from daemons import Daemon, Manager


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], manager: Manager) -> Daemon:
    """A running rank without a configured model, with a fd store."""
    return make_daemon(manager=manager).start()
