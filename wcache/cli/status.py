# SPDX-License-Identifier: Apache-2.0
"""`wcache status`: one line for the group, one row a rank and shard, then engines, misses and problems.

`--json` is the same document (`GroupReport`, with each rank's own `RankStatus` in it). Looking starts nothing: a
stopped rank stays stopped.
"""

from __future__ import annotations

import posixpath
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from wcache.cli import context as contexts
from wcache.cli import render
from wcache.cli.context import Context
from wcache.cli.ranks import GroupReport, RankReport, chosen, look, remark
from wcache.daemon.status import count, size
from wcache.errors import NotReady
from wcache.model import ShardState
from wcache.protocol.messages import LeaseInfo, MissInfo, RankStatus, ShardInfo

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WATCH_INTERVAL_S = 1.0
_WIDE = 110  # columns from which a table has room for more
_COLOURS = {"ready": "green", "failed": "bold red", "unresponsive": "bold red", "denied": "red", "unreachable": "red"}


def status(
    ctx: typer.Context,
    rank: Annotated[int | None, typer.Argument(min=0, metavar="[RANK]", help="Only this rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The document instead of tables.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking until interrupted.")] = False,
) -> None:
    """What every rank holds and who uses it.

    Also what was last missed, and why. Looking starts nothing. Exit status 3 if a rank is not ready.
    """
    context = contexts.of(ctx)
    ranks = chosen(context.config, rank)
    if watch:
        follow(context, ranks, as_json=as_json)
        return
    report = look(context, ranks)
    if as_json:
        render.document(report)
    else:
        console = render.console()
        for part in view(report, console.width):
            console.print(part)
    if not report.all_ready:
        raise typer.Exit(NotReady.exit_status)


def follow(context: Context, ranks: tuple[int, ...], *, as_json: bool) -> None:
    """Live on a terminal; elsewhere each change once."""
    if sys.stdout.isatty() and not as_json:
        _live(context, ranks)
        return
    last: object = None
    try:
        for report in _reports(context, ranks):
            if report == last:
                continue
            last = report
            if as_json:
                render.line_document(report)
            else:
                render.console().print(headline(report))
    except KeyboardInterrupt:  # how one ends a watch
        return


def _live(context: Context, ranks: tuple[int, ...]) -> None:
    from rich.console import Group
    from rich.live import Live

    console = render.console()
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for report in _reports(context, ranks):
                head = f"[dim]{time.strftime('%H:%M:%S')}, every {WATCH_INTERVAL_S:.0f} s, Ctrl-C ends[/]"
                live.update(Group(head, *view(report, console.width)), refresh=True)
    except KeyboardInterrupt:  # how one ends a watch
        return


def _reports(context: Context, ranks: tuple[int, ...]) -> Iterator[GroupReport]:
    while True:
        yield look(context, ranks)
        time.sleep(WATCH_INTERVAL_S)


def view(report: GroupReport, width: int) -> list[RenderableType]:
    """The parts of the page, top to bottom."""
    parts: list[RenderableType] = [headline(report), "", _ranks_table(report, width)]
    leases = [(r.rank, lease) for r in report.ranks if r.status for s in r.status.shards for lease in s.leases]
    if leases:
        parts += ["", _engines_table(leases, width)]
    details = [line for r in report.ranks for line in _details(r)]
    if details:
        parts += ["", *details]
    return parts


def headline(report: GroupReport) -> str:
    """The group in one line."""
    from rich.markup import escape

    said = [r.status for r in report.ranks if r.status is not None]
    colour = "green" if report.all_ready and not any(map(remark, said)) else "yellow"
    modes = sorted({str(s.mode) for s in said})
    policies = sorted({str(s.policy) for s in said})
    parts = [escape(model_name(report.model)) if report.model else "no model"]
    parts += ["/".join(modes)] if modes else []
    parts += ["identity by " + "/".join(policies)] if policies else []
    parts.append("no units" if report.manager is None else f"{report.manager} manager")
    return f"[bold {colour}]{report.ready} of {count(report.total, 'rank')} ready[/]  {', '.join(parts)}"


def _ranks_table(report: GroupReport, width: int) -> Table:
    wide = width >= _WIDE
    headings = ["RANK", "STATE", "DEVICE", "SHARD", "MODEL", *(["DTYPE", "FROM"] if wide else [])]
    headings += ["WEIGHTS", "MEMORY", "ENGINES"]
    right = ("RANK", "WEIGHTS", "MEMORY", "ENGINES")
    return render.table(headings, _rows(report, wide), width=width, right=right, flexible="MODEL")


def _rows(report: GroupReport, wide: bool) -> Iterator[list[str]]:
    """A row per shard; a rank's own cells stand on its first."""
    letters = 12 if wide else 8
    for rank in report.ranks:
        shards: Sequence[ShardInfo] = rank.status.shards if rank.status is not None else ()
        head = [str(rank.rank), _coloured(rank.state), rank.device[:letters]]
        if not shards:
            yield [*head, "-", "-", *(["-", "-"] if wide else []), "-", "-", "-"]
        for shard in shards:
            yield [*head, *_shard_cells(shard, wide, letters)]
            head = ["", "", ""]


def _shard_cells(shard: ShardInfo, wide: bool, letters: int) -> list[str]:
    from rich.markup import escape

    resident = shard.state is ShardState.RESIDENT
    name = shard.fingerprint[:letters] if resident else f"[bold red]{shard.fingerprint[:letters]}[/]"
    source = f"{shard.origin}, restored" if shard.restored else str(shard.origin)
    extra = [shard.dtype, source] if wide else []
    return [
        name, escape(model_name(shard.model)), *extra, size(shard.weight_bytes), size(shard.segment_bytes),
        str(len(shard.leases)),
    ]  # fmt: skip


def model_name(model: str) -> str:
    """A directory by its last name; a hub snapshot by its repository."""
    parts = [p for p in posixpath.normpath(model).split("/") if p]
    for part in parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return parts[-1] if parts else model


def _coloured(state: str) -> str:
    return f"[{_COLOURS.get(state, 'yellow')}]{state}[/]"


def _engines_table(leases: list[tuple[int, LeaseInfo]], width: int) -> Table:
    from rich.markup import escape

    def row(rank: int, lease: LeaseInfo) -> list[str]:
        pid = "?" if lease.pid is None else str(lease.pid)
        return [escape(lease.name), pid, str(lease.uid), str(rank), str(lease.mode), render.ago(lease.since)]

    rows = [row(rank, lease) for rank, lease in sorted(leases, key=lambda entry: (entry[0], entry[1].since))]
    headings = ("ENGINE", "PID", "UID", "RANK", "MODE", "SINCE")
    return render.table(headings, rows, width=width, right=("PID", "UID", "RANK"), flexible="ENGINE")


def _details(report: RankReport) -> Iterator[str]:
    """What a rank has to say beyond its row, one line each."""
    from rich.markup import escape

    who = f"[bold]rank {report.rank}[/]"
    if report.problem:
        yield f"{who}  {escape(render.short(report.problem))}"
    said = report.status
    if said is None:
        return
    if not report.ready and said.text and not (report.problem and report.problem in said.text):
        yield f"{who}  {escape(said.text)}"
    if (more := remark(said)) and more != report.problem:
        yield f"{who}  {escape(render.short(more))}"
    for shard in said.shards:
        if shard.problem or shard.state is not ShardState.RESIDENT:
            yield f"{who}  shard {shard.fingerprint[:12]} is {shard.state}: {escape(shard.problem)}"
    yield from (f"{who}  {line}" for line in _memory(said))
    if said.last_miss is not None:
        yield from (f"{who}  {line}" if i == 0 else line for i, line in enumerate(miss_lines(said.last_miss, said)))


def _memory(said: RankStatus) -> Iterator[str]:
    """Where a device's memory is, if the rank knows more than the weights."""
    memory = said.memory
    if "total" in memory:
        parts = [k for k in ("weights", "engines", "others", "unexplained") if memory.get(k)]
        listed = ", ".join(f"{name} {size(memory[name])}" for name in parts)
        if memory.get("no_process"):
            listed += f"; nvidia-smi shows {size(memory['no_process'])} of it under no process"
        listed = listed or "nothing"
        yield f"memory: {size(memory.get('used', 0))} of {size(memory['total'])} in use: {listed}"
        if memory.get("missing"):
            gone = size(memory["missing"])
            yield f"[red]memory: {gone} of resident shards cannot be on the GPU any more: was it reset?[/]"


def miss_lines(miss: MissInfo, said: RankStatus | None = None) -> Iterator[str]:
    """A miss and the fields it was about."""
    from rich.markup import escape

    by = f"{miss.engine} (pid {miss.pid})" if miss.pid is not None else miss.engine
    total = sum(said.misses.values()) if said is not None else 0
    counted = f", {total} misses so far" if total > 1 else ""
    yield f"[yellow]last miss[/] {render.ago(miss.when)} by {escape(by)}: {miss.reason}{counted}"
    if not miss.differences:
        yield f"        {escape(render.short(miss.message))}"
    for d in miss.differences:
        asked, resident = render.value(d.asked), render.value(d.resident)
        yield f"        {escape(d.field)}: asked {escape(asked)}, resident {escape(resident)}"
