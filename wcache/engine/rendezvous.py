# SPDX-License-Identifier: Apache-2.0
"""How the loader children of one host find each other: the first rank picks a port and writes it beside the sockets.

Runs in the preloads of `loader = "vllm"` and "transformers". The file names the process that wrote it, so that what a
killed loader left behind is never taken for an invitation. Whoever waits says for whom, and gives up at a deadline.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import psutil

from wcache.errors import LoaderError

FILE = "rendezvous-{first}.json"
_POLL_S = 0.1


def meet(directory: Path, rank: int, first: int, size: int, deadline_s: float) -> str:
    """The address (`tcp://127.0.0.1:PORT`) where the group forms. Raises LoaderError when the first rank is absent."""
    if size == 1:
        return _address(_free_port())
    path = directory / FILE.format(first=first)
    return _invite(path) if rank == first else _accept(path, rank, first, deadline_s)


def _invite(path: Path) -> str:
    port = _free_port()
    word = {"port": port, "pid": os.getpid(), "started": psutil.Process().create_time()}
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(word))
    fresh.replace(path)
    return _address(port)


def _accept(path: Path, rank: int, first: int, deadline_s: float) -> str:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        port = _living(path)
        if port is not None:
            return _address(port)
        time.sleep(_POLL_S)
    raise LoaderError(
        f"rank {rank} waited {deadline_s:.0f} s for the loader of rank {first}, which loads with it",
        hint="the ranks of one model load together: wcache restart-group --reload",
    )


def _living(path: Path) -> int | None:
    """The port that a process which still runs wrote down."""
    try:
        word = json.loads(path.read_text())
        if psutil.Process(word["pid"]).create_time() == word["started"]:
            return int(word["port"])
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return None


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _address(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"
