# SPDX-License-Identifier: Apache-2.0
"""What the public functions are told, as what the rest works with: sockets, devices, dtypes, the host's digest store.

Runs in engines. Defaults come from the same wcache.toml that the ranks read, so that both sides agree without a word.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from wcache import config
from wcache.config import Scope
from wcache.engine.tensors import gpu_uuid
from wcache.errors import ConfigError, PublishError
from wcache.model import CPU
from wcache.protocol.connection import socket_path
from wcache.weights.digests import DigestStore
from wcache.weights.identity import open_store


@dataclass(frozen=True, slots=True)
class Where:
    """Which rank is asked, by whom, and until when (`deadline`: time.monotonic()) a load under way is waited for."""

    path: Path
    name: str
    device: str | None
    connect_timeout_s: float
    deadline: float

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


def where(
    model: str | os.PathLike[str],
    rank: int,
    *,
    socket_dir: str | os.PathLike[str] | None,
    path: str | os.PathLike[str] | None,
    name: str | None,
    device: str | None,
    connect_timeout_s: float,
    state_timeout_s: float,
) -> Where:
    """Raises ConfigError, Unavailable for a path that no socket can have."""
    if path is not None and socket_dir is not None:
        raise ConfigError("socket_dir and socket_path exclude each other")
    directory = Path(socket_dir) if socket_dir is not None else None
    return Where(
        Path(path) if path is not None else socket_path(directory or default_socket_dir(), rank),
        name or f"{Path(model).name} pid {os.getpid()}",
        device,
        connect_timeout_s,
        time.monotonic() + state_timeout_s,
    )


def host_store() -> DigestStore:
    """The digest store that this host's ranks use, as far as wcache.toml says."""
    scope = config.default_scope()
    return open_store(config.state_dir_of(config.load_or_default(scope), scope))


def default_socket_dir() -> Path:
    """Where ranks listen: as wcache.toml says, else the user's own agent's directory, else the system's."""
    scope = config.default_scope()
    host = config.load_or_default(scope)
    if host.socket_dir is not None:
        return Path(host.socket_dir)
    own = config.runtime_dir(scope)
    return own if own.is_dir() else config.runtime_dir(Scope.SYSTEM)


def dtype_option(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_option(device: str | torch.device | None) -> str | None:
    """ "cpu" or a GPU's UUID, from what torch would call it. Raises ConfigError."""
    if device is None or device == CPU or str(device).startswith(("GPU-", "MIG-")):
        return None if device is None else str(device)
    try:
        where = torch.device(device)
    except RuntimeError as e:
        raise ConfigError(f"device {device!r}: cpu, cuda:N or a GPU's UUID is expected") from e
    if where.type == CPU:
        return CPU
    if where.type != "cuda":
        raise ConfigError(f"device {device!r}: cpu, cuda:N or a GPU's UUID is expected")
    return gpu_uuid(where.index if where.index is not None else torch.cuda.current_device())


def device_of(tensor: torch.Tensor) -> str:
    """Where a live tensor is. Raises PublishError for a place that cannot be shared."""
    if tensor.device.type == CPU:
        return CPU
    if tensor.device.type != "cuda":
        raise PublishError(f"tensors on {tensor.device} cannot be shared")
    return gpu_uuid(tensor.device.index)
