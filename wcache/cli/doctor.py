# SPDX-License-Identifier: Apache-2.0
"""`wcache doctor`: everything about this host that decides whether the cache works, each with what to do about it.

The checks are in `checks.py`. Exit status 1 if one failed; warnings alone leave it 0.
"""

from __future__ import annotations

from typing import Annotated

import typer

from wcache.cli import context as contexts
from wcache.cli import render
from wcache.errors import WcacheError

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="The document instead of lines.")] = False,
) -> None:
    """Check this host.

    Configuration, units, sockets, limits, driver and installed packages.
    """
    from rich.markup import escape

    from wcache.cli.checks import Verdict, examine

    findings = list(examine(contexts.of(ctx)))
    if as_json:
        render.document(findings)
    else:
        console = render.console()
        for finding in findings:
            mark = f"[{_COLOURS[finding.verdict]}]{finding.verdict:<7}[/]"
            console.print(f"{mark}  [bold]{finding.name}[/]: {escape(finding.text)}")
            if finding.hint:
                console.print(f"         hint: {escape(finding.hint)}")
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        raise typer.Exit(WcacheError.exit_status)
