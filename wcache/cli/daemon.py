# SPDX-License-Identifier: Apache-2.0
"""`wcache daemon`, what the unit runs, and `wcache version`.

The daemon is its own program in place of this one: the pid, LISTEN_FDS and NOTIFY_SOCKET stay as systemd gave them,
and its process imports neither typer nor rich.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from wcache import __version__
from wcache.cli import context as contexts
from wcache.config import Scope


def daemon(
    ctx: typer.Context,
    rank: Annotated[int, typer.Option("--rank", min=0, metavar="N", help="The rank to serve.")],
) -> None:
    """Serve one rank in the foreground.

    This is what wcache@N.service runs; it also works without systemd.
    """
    context = contexts.of(ctx)
    command = [sys.executable, "-P", "-m", "wcache.daemon", "--rank", str(rank)]  # -P: not from the current directory
    if context.asked_config is not None:
        command += ["--config", str(context.asked_config.absolute())]
    if context.asked_scope is Scope.USER:
        command.append("--user")
    if context.debug:
        command.append("--debug")
    sys.stdout.flush()
    os.execv(sys.executable, command)


def version() -> None:
    """Print the version."""
    print(__version__)
