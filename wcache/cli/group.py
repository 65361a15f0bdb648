# SPDX-License-Identifier: Apache-2.0
"""Verbs of the group's life: `wcache start`, `stop`, `restart-group`, `clean`.

They drive the units and watch the ranks meanwhile; the service manager does the work and goes on with it if we are
interrupted. Sockets that a dead daemon left are removed first: known to be dead by its lock, never by an errno.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from wcache.cli import context as contexts
from wcache.cli import render
from wcache.cli.context import Context
from wcache.cli.ranks import GroupReport, RankReport, ask_all, chosen, look, look_at_units, shortfall, way_back
from wcache.cli.shards import RankArgument, end
from wcache.cli.waiting import failures, watch
from wcache.config import Scope
from wcache.errors import NotReady, SystemdError, WcacheError
from wcache.host import units
from wcache.host.lock import clear_stale
from wcache.host.units import Unit
from wcache.model import RankState
from wcache.protocol.connection import Connection
from wcache.protocol.messages import Done, Reload


def start(ctx: typer.Context, rank: RankArgument = None) -> None:
    """Start the ranks, wait until ready.

    Returns when every rank's weights are resident; exit status 1 if a rank failed, 3 if one does not hold what is
    configured.
    """
    context = contexts.of(ctx)
    manager = context.need_manager()
    ranks = chosen(context.config, rank)
    prepare(context, manager, ranks)
    began = time.monotonic()
    if rank is None:
        units.start_soon(manager, units.TARGET)
    run(context, manager, "start", [units.service(one) for one in ranks], ranks)
    verdict(context, ranks, began)


def stop(ctx: typer.Context, rank: RankArgument = None) -> None:
    """Stop the ranks.

    Says what memory is freed, what is kept, and which engines still map it.
    """
    from wcache.cli.stopping import describe

    context = contexts.of(ctx)
    manager = context.need_manager()
    ranks = chosen(context.config, rank)
    before = look(context, ranks)
    names = [*_names(ranks, whole=rank is None), *map(units.socket_unit, ranks)]
    run(context, manager, "stop", names, ranks)
    for line in describe(before, look_at_units(context, ranks)):
        print(line)


def restart_group(
    ctx: typer.Context,
    reload: Annotated[bool, typer.Option("--reload", help="Drop what is resident and read it anew.")] = False,
) -> None:
    """Restart every rank.

    Weights that still match are taken back without reading a byte; the rest is loaded.
    """
    context = contexts.of(ctx)
    began = time.monotonic()
    ranks = context.config.ranks
    if context.manager is None and reload:
        reload_in_place(context, ranks)
        return
    manager = context.need_manager()
    seen = prepare(context, manager, ranks)
    services = [units.service(rank) for rank in ranks]
    if reload:
        run(context, manager, "stop", services, ranks)
        free_stores(context, manager, ranks)
        units.start_soon(manager, units.TARGET)
        run(context, manager, "start", services, ranks)
    else:
        units.start_soon(manager, units.TARGET)
        run(context, manager, "restart", [*_lost_sockets(context, seen, ranks), *services], ranks)
    verdict(context, ranks, began)


def clean(ctx: typer.Context) -> None:
    """Remove sockets of dead daemons.

    Never touches one whose daemon lives, or that systemd owns.
    """
    context = contexts.of(ctx)
    ranks = sorted({*context.config.ranks, *_ranks_with_sockets(context)})
    failed: dict[int, WcacheError] = {}
    for rank, unit in _sockets(context, ranks).items():
        if unit is not None:
            print(f"rank {rank}: its socket belongs to {unit.name}")
            continue
        try:
            removed = clear_stale(context.socket(rank))
            print(f"rank {rank}: {'stale socket removed' if removed else 'nothing to clean'}")
        except WcacheError as e:
            failed[rank] = e
    end({rank: failed.get(rank) for rank in ranks}, 0)


def reload_in_place(context: Context, ranks: tuple[int, ...]) -> None:
    """Without units: ask the daemons that run in the foreground, and wait."""

    def ask(_: int, connection: Connection) -> Done:
        return connection.ask(Reload(), Done)

    began = time.monotonic()
    end(ask_all(context, ranks, ask), 0)
    watch(context, ranks, _settled)
    verdict(context, ranks, began)


def _settled(report: GroupReport | None) -> bool:
    return report is not None and not any(r.state in ("loading", "starting", "verifying") for r in report.ranks)


def prepare(context: Context, manager: Scope, ranks: tuple[int, ...]) -> dict[str, Unit]:
    """Stale sockets out of the way, failures forgotten. Raises Busy where a daemon runs that no unit knows of."""
    for rank, unit in _sockets(context, ranks).items():
        if unit is None and clear_stale(context.socket(rank)):
            render.say(f"rank {rank}: stale socket removed")
    seen = look_at_units(context, ranks)
    missing = [name for name, unit in seen.items() if not unit.exists]
    if missing:
        raise SystemdError(
            f"the {manager} manager does not know {missing[0]}", hint="scripts/install, then daemon-reload"
        )
    failed = [name for name, unit in seen.items() if unit.active == "failed"]
    if failed:
        units.reset_failed(manager, failed)
    return seen


def run(context: Context, manager: Scope, verb: str, names: list[str], ranks: tuple[int, ...]) -> None:
    """One job of the service manager, watched to its end. Raises SystemdError with what became of the ranks."""
    with units.job(manager, verb, names) as job, failures(context, ranks) as failed:
        try:
            watch(context, ranks, lambda _: job.done(0.0), pause=job.done)
        except KeyboardInterrupt:
            render.say(f"the {manager} manager goes on with the {verb}; wcache status shows how far it is")
            raise
        problem = job.problem()
    if problem:
        alike: dict[str, list[str]] = {}
        for rank, text in sorted(failed.items()):
            alike.setdefault(text, []).append(str(rank))
        said = [f"rank {', '.join(numbers)}: {text}" for text, numbers in alike.items()]
        raise SystemdError("; ".join(said) or problem.splitlines()[0], hint="wcache logs shows why")


def verdict(context: Context, ranks: tuple[int, ...], began: float) -> None:
    """The answer: how many ranks are ready. Raises NotReady if some are not, or hold other weights than configured."""
    report = look(context, ranks)
    for rank in report.ranks:
        if rank.status is not None and rank.ready:
            print(f"rank {rank.rank}: {rank.status.text}")
    waiting = [(rank, text) for rank in report.ranks if (text := _lacking(rank))]
    if waiting:
        given_up = any(rank.state == RankState.DRAINING or (rank.ready and not rank.problem) for rank, _ in waiting)
        hint = way_back(context) if given_up else "wcache status; wcache logs"
        raise NotReady("; ".join(text for _, text in waiting), hint=hint)
    render.say(f"all ready after {time.monotonic() - began:.1f} s")


def _lacking(rank: RankReport) -> str:
    """Why a rank does not serve what is configured; empty if it does."""
    if not rank.ready:
        return f"rank {rank.rank} is {rank.state}" + (f": {rank.problem}" if rank.problem else "")
    text = shortfall(rank.status) if rank.status is not None else ""
    return f"rank {rank.rank}: {text}" if text else ""


def free_stores(context: Context, manager: Scope, ranks: tuple[int, ...]) -> None:
    """After a stop: what the fd stores kept is not wanted."""
    kept = [unit.name for unit in look_at_units(context, ranks).values() if unit.stored_fds > 0]
    if kept:
        units.clean_fd_store(manager, kept)


def _names(ranks: tuple[int, ...], *, whole: bool) -> list[str]:
    return [*([units.TARGET] if whole else []), *map(units.service, ranks)]


def _sockets(context: Context, ranks: tuple[int, ...] | list[int]) -> dict[int, Unit | None]:
    """By rank: the socket unit that owns its path now; None if nobody but a daemon's lock can say."""
    seen = look_at_units(context, ranks)
    found = {rank: seen.get(units.socket_unit(rank)) for rank in ranks}
    return {rank: unit if unit is not None and unit.active == "active" else None for rank, unit in found.items()}


def _lost_sockets(context: Context, seen: dict[str, Unit], ranks: tuple[int, ...]) -> list[str]:
    """Socket units that listen at a path that somebody removed; restarting them makes it anew."""
    names = {rank: units.socket_unit(rank) for rank in ranks if seen[units.socket_unit(rank)].active == "active"}
    return [name for rank, name in names.items() if not context.socket(rank).exists()]


def _ranks_with_sockets(context: Context) -> list[int]:
    names = [path.name for path in context.socket_dir.glob("rank-*.sock")]
    numbers = [name.removeprefix("rank-").removesuffix(".sock") for name in names]
    return [int(number) for number in numbers if number.isdigit()]
