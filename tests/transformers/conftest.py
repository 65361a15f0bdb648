# SPDX-License-Identifier: Apache-2.0
"""A running rank for each test, and comparison bit for bit of what two processes or two loads hold."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tqdm
import transformers
from daemons import Daemon

_LIBC = ctypes.CDLL(None, use_errno=True)
_IN_OPEN, _IN_NONBLOCK = 0x20, 0x800
_EVENT = struct.Struct("iIII")


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
def opened() -> Callable[[Path], object]:
    """Files of a directory that anybody opens while the block runs (inotify(7): the kernel's word, not a mock's)."""

    @contextmanager
    def watch(directory: Path) -> Iterator[list[str]]:
        names: list[str] = []
        fd = _LIBC.inotify_init1(_IN_NONBLOCK)
        assert fd >= 0
        try:
            assert _LIBC.inotify_add_watch(fd, os.fsencode(directory), _IN_OPEN) >= 0
            yield names
            names += _names(fd)
        finally:
            os.close(fd)

    return watch


def _names(fd: int) -> list[str]:
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return []
    names, at = [], 0
    while at < len(data):
        *_, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        names.append(data[at : at + length].rstrip(b"\0").decode())
        at += length
    return names
