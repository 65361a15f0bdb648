# SPDX-License-Identifier: Apache-2.0
"""Verbs about what is resident: `wcache verify`, `wcache evict`, `wcache drain`.

Each asks all chosen ranks at once and says per rank what came of it; the exit status is that of the worst rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from wcache.cli import context as contexts
from wcache.cli import render
from wcache.cli.ranks import ask_all, chosen, way_back
from wcache.daemon.status import size
from wcache.errors import Busy, IntegrityError, NoSuchShard, WcacheError
from wcache.protocol.connection import Connection
from wcache.protocol.messages import (
    Done,
    Drain,
    Evict,
    Evicted,
    GetStatus,
    Pending,
    ShardInfo,
    Status,
    Verified,
    Verify,
)

RankArgument = Annotated[int | None, typer.Argument(min=0, metavar="[RANK]", help="Only this rank.")]
RankOption = Annotated[int | None, typer.Option("--rank", min=0, metavar="N", help="Only this rank.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The document instead of lines.")]


def verify(ctx: typer.Context, rank: RankArgument = None, as_json: JsonOption = False) -> None:
    """Recompute the digests of resident shards.

    Engines may be attached. A shard that differs is quarantined: not served any more, and loaded anew.
    """
    context = contexts.of(ctx)

    def ask(number: int, connection: Connection) -> Verified:
        return connection.ask(Verify(), Verified, on_pending=_teller(number))

    answers = ask_all(context, chosen(context.config, rank), ask)
    if as_json:
        render.document(_documents(answers))
    bad = 0
    for number, answer in answers.items():
        for verdict in answer.verdicts if isinstance(answer, Verified) else ():
            bad += not verdict.ok
            if not as_json:
                rate = f"{size(verdict.bytes_checked)} in {verdict.seconds:.2f} s"
                said = "intact" if verdict.ok else f"DAMAGED, quarantined: {verdict.problem}"
                print(f"rank {number}: shard {verdict.fingerprint[:12]} {said} ({rate})")
        if isinstance(answer, Verified) and not answer.verdicts and not as_json:
            print(f"rank {number}: nothing is resident")
    end(answers, IntegrityError.exit_status if bad else 0)


def evict(
    ctx: typer.Context,
    fingerprint: Annotated[str | None, typer.Argument(help="A shard, by its first characters. Default: all.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even if engines are attached; they keep their mapping.")
    ] = False,
    rank: RankOption = None,
    as_json: JsonOption = False,
) -> None:
    """Free shards.

    Refused while engines are attached, unless forced.
    """
    from wcache.cli.stopping import freed, mapped_by

    if fingerprint == "":
        raise typer.BadParameter("an empty fingerprint names no shard; leave it out to mean every shard")
    context = contexts.of(ctx)
    before: dict[int, tuple[ShardInfo, ...]] = {}

    def ask(number: int, connection: Connection) -> Evicted:
        if force:
            before[number] = connection.ask(GetStatus(), Status).status.shards
        return connection.ask(Evict(fingerprint=fingerprint, force=force), Evicted)

    answers = ask_all(context, chosen(context.config, rank), ask)
    if fingerprint is not None and any(isinstance(a, Evicted) for a in answers.values()):
        answers = {n: a for n, a in answers.items() if not isinstance(a, NoSuchShard)}  # a shard is of one rank
    if as_json:
        render.document(_documents(answers))
    else:
        for number, answer in answers.items():
            if isinstance(answer, Evicted):
                names = ", ".join(f[:12] for f in answer.fingerprints) or "nothing was resident"
                gone = [s for s in before.get(number, ()) if s.fingerprint in answer.fingerprints]
                for line in (f"rank {number}: {names}: {freed(answer.bytes_freed, gone)}", *mapped_by(gone)):
                    print(line)
    end(answers, 0)


def drain(
    ctx: typer.Context,
    rank: RankArgument = None,
    deadline: Annotated[float | None, typer.Option("--deadline", min=0, metavar="S", help="Seconds to wait.")] = None,
) -> None:
    """Let engines end, then free everything.

    Takes no new engines and waits for the attached ones: before a GPU reset or a driver upgrade.
    """
    context = contexts.of(ctx)
    seconds = context.config.timeouts.drain_s if deadline is None else deadline

    def ask(number: int, connection: Connection) -> Done:
        return connection.ask(Drain(deadline_s=seconds), Done, on_pending=_teller(number))

    answers = ask_all(context, chosen(context.config, rank), ask)
    for number, answer in answers.items():
        if isinstance(answer, Done):
            print(f"rank {number}: {answer.text or 'drained'}")
        elif isinstance(answer, Busy) and not answer.data:  # not the engines: it drains, or was drained, already
            answer.hint = way_back(context)
    end(answers, 0)


def _teller(rank: int) -> Any:
    """Says each new text of a rank that is still at work."""
    last = ""

    def tell(pending: Pending) -> None:
        nonlocal last
        if pending.text != last:
            last = pending.text
            render.say(f"rank {rank}: {last}")

    return tell


def _documents(answers: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [
        {"rank": n, "error": {"code": a.code, "message": str(a)}}
        if isinstance(a, WcacheError)
        else {"rank": n, "answer": a}
        for n, a in answers.items()
    ]


def end(answers: Mapping[int, object], status: int) -> None:
    """Say what failed; end with the worst status. A single failure goes to the program's boundary as it is."""
    errors = {n: a for n, a in answers.items() if isinstance(a, WcacheError)}
    if len(answers) == 1 and errors:
        raise next(iter(errors.values()))
    for number, error in errors.items():
        render.say(f"rank {number}: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
    worst = max([status, *(e.exit_status for e in errors.values())])
    if worst:
        raise typer.Exit(worst)
