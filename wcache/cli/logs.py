# SPDX-License-Identifier: Apache-2.0
"""`wcache logs`: journalctl in place of this process, with our units and the events operators alert on."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from wcache import log as events
from wcache.cli import context as contexts
from wcache.cli.ranks import chosen
from wcache.config import Scope
from wcache.errors import SystemdError
from wcache.host import units

ALERTS = (events.RESTORED, events.MISSED, events.QUARANTINED, events.LOAD_FAILED, events.DAEMON_LOST, events.EVICTED)


def logs(
    ctx: typer.Context,
    rank: Annotated[int | None, typer.Argument(min=0, metavar="[RANK]", help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is logged from now on.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="How many to begin with.")] = 100,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help="As journalctl takes it.")] = None,
    alerts: Annotated[bool, typer.Option("--alerts", help="Only misses, failures, evictions, restores.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Every field, one JSON document a line.")] = False,
) -> None:
    """The ranks' journal."""
    context = contexts.of(ctx)
    if rank is not None:
        chosen(context.config, rank)
    command = arguments(context.need_manager(), rank, alerts=alerts)
    command += ["--lines", str(lines)] if since is None else ["--since", since]
    command += [word for word, asked in (("--follow", follow), ("--output=json", as_json)) if asked]
    if shutil.which("journalctl") is None:
        raise SystemdError("there is no journalctl here", hint="the units' StandardOutput= says where logs go")
    sys.stdout.flush()
    os.execvp("journalctl", command)


def arguments(scope: Scope, rank: int | None, *, alerts: bool) -> list[str]:
    """The matches of one rank or of all."""
    flag = "--unit" if scope is Scope.SYSTEM else "--user-unit"
    names = [units.INSTANCES, units.TARGET] if rank is None else [units.service(rank)]
    command = ["journalctl", "--no-pager"]
    for name in names:
        command += [flag, name]
    return command + [f"MESSAGE_ID={event}" for event in ALERTS if alerts]
