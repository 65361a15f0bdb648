# SPDX-License-Identifier: Apache-2.0
"""What every verb starts from: which manager, which configuration, where the sockets are.

Nothing is looked up before a verb asks for it. The scope is the one asked for (`--user`, `--system`), else that of the
manager that has our units, else root means system and anybody else means user.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import typer

from wcache import config as configuration
from wcache.config import Config, Scope
from wcache.errors import SystemdError
from wcache.host import units
from wcache.protocol.connection import socket_path


@dataclass
class Context:
    """The global options of one invocation."""

    asked_scope: Scope | None = None
    asked_config: Path | None = None
    debug: bool = False

    @cached_property
    def manager(self) -> Scope | None:
        """The service manager that has our units; None: ranks run in the foreground, or not at all."""
        if self.asked_scope is None:
            return units.managing_scope()
        asked = self.asked_scope
        return asked if units.reachable(asked) and units.installed(asked) else None

    @cached_property
    def scope(self) -> Scope:
        return self.asked_scope or self.manager or configuration.default_scope()

    @cached_property
    def config(self) -> Config:
        if self.asked_config is not None:
            return configuration.load(self.asked_config)
        return configuration.load_or_default(self.scope)

    @property
    def config_path(self) -> Path:
        return self.asked_config or configuration.config_path(self.scope)

    @property
    def socket_dir(self) -> Path:
        asked = self.config.socket_dir
        return configuration.runtime_dir(self.scope) if asked is None else Path(asked)

    @property
    def state_dir(self) -> Path:
        asked = self.config.state_dir
        return configuration.state_dir(self.scope) if asked is None else Path(asked)

    def socket(self, rank: int) -> Path:
        return socket_path(self.socket_dir, rank)

    def need_manager(self) -> Scope:
        """The manager that runs our units. Raises SystemdError with what to do instead."""
        if self.manager is None:
            which = f"the {self.asked_scope} manager has" if self.asked_scope else "no service manager here has"
            raise SystemdError(
                f"{which} no wcache units" if self.asked_scope else f"{which} wcache units",
                hint="scripts/install puts them in place; without systemd: wcache daemon --rank N, one per rank",
            )
        return self.manager


def of(ctx: typer.Context) -> Context:
    """The Context that the application's callback made."""
    found = ctx.find_object(Context)
    if found is None:
        raise TypeError("a verb ran outside the application")
    return found
