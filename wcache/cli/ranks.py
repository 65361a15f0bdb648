# SPDX-License-Identifier: Apache-2.0
"""Looking at this host's ranks: units first, then sockets, all ranks at once, each with a short deadline.

A rank that is stopped is never connected to (its socket would start it); one that hangs costs two seconds and is
reported as `unresponsive` beside the others. The reports are the document behind `wcache status`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from wcache.cli.context import Context
from wcache.cli.gpu import with_memory
from wcache.config import Config, Scope
from wcache.errors import DeadlineExceeded, Denied, NoSuchRank, Unavailable, WcacheError
from wcache.host import units
from wcache.host.units import Unit
from wcache.model import RankState
from wcache.protocol.connection import REPLY_TIMEOUT_S, Connection, connect
from wcache.protocol.messages import GetStatus, RankStatus, Status

LOOK_TIMEOUT_S = 1.0  # to be welcomed, and again to be answered
ROLE = "admin"
NAME = "wcache-cli"

Answer = TypeVar("Answer")

# States of a rank that does not answer, beside those of RankState.
STOPPED, STOPPING, RESTARTING, UNRESPONSIVE, UNREACHABLE, DENIED = (
    "stopped", "stopping", "restarting", "unresponsive", "unreachable", "denied",
)  # fmt: skip


_NOBODY = (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)  # what a stopped foreground daemon leaves


class UnitReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the service manager sees a rank's service. `stored_fds`: what its fd store keeps."""

    name: str
    active: str
    sub: str
    result: str
    pid: int
    restarts: int
    stored_fds: int
    socket: str


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `state`: a RankState, or why there is none; `status`: what the rank itself said.

    `device`: as the rank says, else as configured; empty if the loader picks it.
    """

    rank: int
    state: str
    ready: bool
    device: str
    unit: UnitReport | None = None
    status: RankStatus | None = None
    problem: str = ""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """This host's ranks. `manager`: the service manager that runs them, None without units."""

    manager: Scope | None
    model: str | None
    ready: int
    total: int
    ranks: tuple[RankReport, ...]

    @property
    def all_ready(self) -> bool:
        return self.ready == self.total


# What the daemon's state.py and loading.py say of a rank without its configured weights.
_LACKING = ("the configured weights were ", "serving the older shard")


def remark(said: RankStatus) -> str:
    """What a ready rank adds to its numbers: evicted, an older shard is served, a quarantine."""
    return said.text.partition("; ")[2] if said.state is RankState.READY else ""


def shortfall(said: RankStatus) -> str:
    """Why a ready rank does not hold the weights that are configured; empty if it does."""
    text = remark(said)
    return text if any(words in text for words in _LACKING) else ""


def way_back(context: Context) -> str:
    """What has a drained or emptied rank hold weights again: `start` leaves a daemon that runs as it is."""
    if context.config.model is not None:
        verb = "restart-group --reload" if context.manager is None else "restart-group"
        return f"wcache {verb} loads the configured weights again"
    if context.manager is not None:
        return "wcache restart-group has it take engines again"
    return "end the rank's wcache daemon and start it again: no model is configured that it could reload"


def chosen(config: Config, asked: int | None) -> tuple[int, ...]:
    """The ranks a verb is about. Raises NoSuchRank."""
    if asked is None:
        return config.ranks
    if asked not in config.ranks:
        known = ", ".join(map(str, config.ranks))
        raise NoSuchRank(f"rank {asked} is not one of this host's ranks ({known})")
    return (asked,)


def dial(context: Context, rank: int, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Connection:
    """A connection to a rank as an administrator. Raises what `connect` raises."""
    return connect(
        context.socket(rank), role=ROLE, name=NAME, timeout_s=LOOK_TIMEOUT_S, reply_timeout_s=reply_timeout_s
    )


def at_once(ranks: Iterable[int], ask: Callable[[int], Answer]) -> dict[int, Answer | WcacheError]:
    """Ask every rank in a thread of its own; an error of ours is that rank's answer."""
    from concurrent.futures import ThreadPoolExecutor

    def guarded(rank: int) -> Answer | WcacheError:
        try:
            return ask(rank)
        except WcacheError as e:
            return e

    order = list(ranks)
    with ThreadPoolExecutor(max_workers=max(1, len(order))) as pool:
        return dict(zip(order, pool.map(guarded, order), strict=True))


def ask_all(
    context: Context, ranks: Iterable[int], ask: Callable[[int, Connection], Answer]
) -> dict[int, Answer | WcacheError]:
    """Ask every rank over its own connection, all at once; a rank that is not up is not started by it."""
    order = list(ranks)
    seen = look_at_units(context, order)

    def one(rank: int) -> Answer:
        if not may_connect(seen, rank):
            raise Unavailable(f"rank {rank} is {seen[units.service(rank)].active}", hint="wcache start")
        with dial(context, rank) as connection:
            return ask(rank, connection)

    return at_once(order, one)


def look(context: Context, ranks: Iterable[int]) -> GroupReport:
    """What every rank is doing now."""
    order = list(ranks)
    seen = look_at_units(context, order)
    answering = [rank for rank in order if may_connect(seen, rank)]
    answers = with_memory(at_once(answering, lambda rank: ask_status(context, rank)))
    reports = tuple(_report(context.config, rank, seen, answers.get(rank)) for rank in order)
    ready = sum(report.ready for report in reports)
    return GroupReport(
        manager=context.manager, model=context.config.model, ready=ready, total=len(reports), ranks=reports
    )


def ask_status(context: Context, rank: int) -> RankStatus:
    with dial(context, rank, reply_timeout_s=LOOK_TIMEOUT_S) as connection:
        return connection.ask(GetStatus(), Status).status


def look_at_units(context: Context, ranks: Iterable[int]) -> dict[str, Unit]:
    """Services and sockets of the ranks, in one call; empty without a manager."""
    if context.manager is None:
        return {}
    names = [name for rank in ranks for name in (units.service(rank), units.socket_unit(rank))]
    return units.show(context.manager, names)


def may_connect(seen: Mapping[str, Unit], rank: int) -> bool:
    """True if connecting starts nothing: a process serves, or no socket unit listens in its place."""
    service, socket = seen.get(units.service(rank)), seen.get(units.socket_unit(rank))
    if service is not None and service.up:
        return True
    return socket is None or socket.active != "active"


def _report(config: Config, rank: int, seen: Mapping[str, Unit], answer: RankStatus | WcacheError | None) -> RankReport:
    service, socket = seen.get(units.service(rank)), seen.get(units.socket_unit(rank))
    unit = None if service is None or not service.exists else _unit_report(service, socket)
    if isinstance(answer, RankStatus):
        ready = answer.state is RankState.READY
        return RankReport(
            rank=rank, state=answer.state.value, ready=ready, device=answer.device, unit=unit, status=answer,
            problem=answer.problem,
        )  # fmt: skip
    state, problem = _silence(service, answer)
    device = config.device(rank) or ""
    return RankReport(rank=rank, state=state, ready=False, device=device, unit=unit, problem=problem)


def _unit_report(service: Unit, socket: Unit | None) -> UnitReport:
    return UnitReport(
        name=service.name,
        active=service.active,
        sub=service.sub,
        result=service.result,
        pid=service.pid,
        restarts=service.restarts,
        stored_fds=service.stored_fds,
        socket="" if socket is None else socket.active,
    )


def _silence(service: Unit | None, error: WcacheError | None) -> tuple[str, str]:
    """Why a rank said nothing: the service manager knows best, then the socket."""
    if service is not None and service.exists and not service.up:
        if service.restarting:
            return RESTARTING, f"{last_words(service)}; systemd starts it again (restart {service.restarts + 1})"
        if service.active == "failed":
            return RankState.FAILED.value, last_words(service)
        if service.active == "deactivating":
            return STOPPING, service.text
        if error is None or isinstance(error, Unavailable):
            return STOPPED, ""
    if isinstance(error, Denied):
        return DENIED, str(error)
    up = service is not None and service.up
    if isinstance(error, Unavailable) and isinstance(error.__cause__, _NOBODY) and not up:
        return STOPPED, str(error)
    if isinstance(error, Unavailable | DeadlineExceeded):
        if service is not None and service.active == "activating":  # the process is there, its listener not yet
            return RankState.STARTING.value, service.text
        return UNRESPONSIVE, str(error)
    return UNREACHABLE, str(error)


def last_words(service: Unit) -> str:
    """How its last process ended, and the last status that it gave."""
    return last_end(service) + (f" ({service.text})" if service.text else "")


def last_end(service: Unit) -> str:
    """How a service's last process ended, in words."""
    if service.result == "signal" or service.exit_code in (2, 3):  # CLD_KILLED, CLD_DUMPED
        import signal

        try:
            name = signal.Signals(service.exit_status).name
        except ValueError:
            name = f"signal {service.exit_status}"
        return f"killed by {name}"
    reason = {"timeout": "took too long", "watchdog": "missed its watchdog", "oom-kill": "killed for memory"}.get(
        service.result
    )
    return reason or f"exited with status {service.exit_status}"
