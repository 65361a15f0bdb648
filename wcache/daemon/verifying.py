# SPDX-License-Identifier: Apache-2.0
"""When shards are checked, and what follows: on request, after a restore, in the background; quarantine on proof.

Runs in session threads, the preloading thread and a background thread. A shard freed meanwhile is no failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from wcache.daemon import checking
from wcache.daemon.facts import Shard
from wcache.daemon.rank import Rank
from wcache.errors import NoSuchShard
from wcache.log import QUARANTINED, fields
from wcache.model import BackendName
from wcache.protocol.messages import ShardVerdict

log = logging.getLogger(__name__)


class _Stopping(Exception):
    """The daemon ends: nobody waits for the verdict any more."""


def verify(rank: Rank, prefix: str | None, waiting: checking.Waiting) -> tuple[ShardVerdict, ...]:
    """Recompute digests on request. `waiting` is called every second and may raise. Raises NoSuchShard."""
    verdicts = []
    for shard in rank.read(lambda state: state.shards(prefix)):
        if not shard.held:
            verdicts.append(_report(shard, checking.Verdict(f"quarantined: {shard.problem}", False, 0, 0.0)))
            continue
        try:
            verdict = check(rank, shard, waiting)
        except NoSuchShard as e:
            verdict = checking.Verdict(str(e), False, 0, 0.0)
        if verdict.condemned:
            condemn(rank, shard, verdict.problem)
        verdicts.append(_report(shard, verdict))
    return tuple(verdicts)


def verify_restored(rank: Rank, stopping: Callable[[], bool]) -> None:
    """Restored GPU segments may be dead (a reset, another driver): proven before anybody gets them.

    For sealed host segments seals and sizes are proof enough to serve; `verify_in_background` follows.
    """
    if rank.who.config.backend is BackendName.HOST:
        return
    for shard in rank.read(lambda state: state.shards()):
        verdict = _unhurried(rank, shard, stopping, background=False)
        if verdict is not None and not verdict.ok:
            condemn(rank, shard, verdict.problem)
    with rank.state() as state:
        state.verification_over()


def verify_in_background(rank: Rank, stopping: Callable[[], bool]) -> None:
    for shard in rank.read(lambda state: [s for s in state.shards() if s.restored and s.verified is None]):
        verdict = _unhurried(rank, shard, stopping, background=True)
        if verdict is None or verdict.ok:
            continue
        if verdict.condemned:
            condemn(rank, shard, verdict.problem)
        else:
            log.warning("rank %d: shard %s could not be verified: %s", rank.who.rank, shard.name, verdict.problem)


def check(rank: Rank, shard: Shard, waiting: checking.Waiting, *, background: bool = False) -> checking.Verdict:
    """Check one shard and note when it was found good. Raises NoSuchShard, and what `waiting` raises."""
    with rank.store.lend(shard.generation) as holding:
        manifest = rank.store.read_manifest(shard.generation)
        verdict = checking.check(holding, manifest, waiting, background=background)
    if verdict.ok:
        with rank.state() as state:
            state.verified(shard.generation, time.time())
    return verdict


def condemn(rank: Rank, shard: Shard, problem: str) -> None:
    """Quarantine a shard whose bytes are proven not to be those that were committed."""
    with rank.state() as state:
        condemned = state.quarantine(shard.generation, problem)
    if condemned is not None:
        log.error(
            "rank %d quarantined shard %s generation %d: %s", rank.who.rank, shard.name, shard.generation, problem,
            extra=fields(MESSAGE_ID=QUARANTINED, WCACHE_RANK=rank.who.rank, WCACHE_FINGERPRINT=shard.id),
        )  # fmt: skip


def _unhurried(rank: Rank, shard: Shard, stopping: Callable[[], bool], *, background: bool) -> checking.Verdict | None:
    """None if the shard went meanwhile, or the daemon stops."""

    def waiting(_: str) -> None:
        if stopping():
            raise _Stopping

    try:
        return check(rank, shard, waiting, background=background)
    except (NoSuchShard, _Stopping):
        return None


def _report(shard: Shard, verdict: checking.Verdict) -> ShardVerdict:
    return ShardVerdict(
        fingerprint=shard.id,
        ok=verdict.ok,
        problem=verdict.problem,
        bytes_checked=verdict.bytes_checked,
        seconds=verdict.seconds,
    )
