# SPDX-License-Identifier: Apache-2.0
"""What `--model-loader-extra-config` may say. Read in every process of vLLM, before anything is asked of a rank.

Unset options take their value from the host's wcache.toml, so that an engine finds the daemon it belongs to without
being told. A key that is not known is an error which names the nearest one: nothing is ignored in silence.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from wcache import config
from wcache.config import CONNECT_TIMEOUT_S, STATE_TIMEOUT_S, Scope
from wcache.errors import ConfigError
from wcache.model import IdentityPolicy, Mode
from wcache.protocol.connection import socket_path

WHAT = "--model-loader-extra-config"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`fallback` false: a miss fails the start. `publish` false: a cold start leaves the cache as it was.

    `socket_path` names one rank's socket, for engines of a single rank. Times are seconds: `connect_timeout_s` to be
    welcomed by a rank, `state_timeout_s` to wait for a publication in progress. `identity`: see IdentityPolicy.
    """

    mode: Mode = Mode.ZERO_COPY
    fallback: bool = True
    publish: bool = True
    socket_dir: str | None = None
    socket_path: str | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    state_timeout_s: float = STATE_TIMEOUT_S
    identity: IdentityPolicy = IdentityPolicy.CONTENT

    def socket(self, rank: int) -> Path:
        """Where rank `rank` listens."""
        if self.socket_path is not None:
            return Path(self.socket_path)
        return socket_path(self.directory(), rank)

    def directory(self) -> Path:
        """The directory of the sockets: the one named, the user's own agent's, or the system's."""
        if self.socket_dir is not None:
            return Path(self.socket_dir)
        own = config.runtime_dir(config.default_scope())
        return own if own.is_dir() else config.runtime_dir(Scope.SYSTEM)


def parse(extra: object) -> Options:
    """Check `--model-loader-extra-config`. Raises ConfigError."""
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{WHAT}: an object is expected, not a {type(extra).__name__}")
    known = [f.name for f in msgspec.structs.fields(Options)]
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            meant = f"; did you mean {near[0]}?" if near else f"; valid: {', '.join(known)}"
            raise ConfigError(f"{WHAT}: unknown key {key!r}{meant}")
    try:
        options = msgspec.convert({**_host_defaults(), **extra}, Options)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{WHAT}: {e}") from e
    for name in ("connect_timeout_s", "state_timeout_s"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"{WHAT}: {name} must be positive")
    if options.socket_dir is not None and options.socket_path is not None:
        raise ConfigError(f"{WHAT}: socket_dir and socket_path exclude each other")
    return options


def _host_defaults() -> dict[str, Any]:
    """What wcache.toml says about its ranks. A user's engine may use the system's ranks, hence both files."""
    for scope in dict.fromkeys((config.default_scope(), Scope.SYSTEM)):
        path = config.config_path(scope)
        if path.exists() and os.access(path, os.R_OK):
            host = config.load(path)
            found: dict[str, Any] = {"mode": host.mode, "identity": host.identity}
            return found | ({"socket_dir": host.socket_dir} if host.socket_dir else {})
    return {}
