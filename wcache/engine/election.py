# SPDX-License-Identifier: Apache-2.0
"""One question to a rank: a lease on what is resident, or, after a miss, the right to be its single writer.

Runs in engines. Of two that start cold together one loads and publishes, the other waits for it. Whatever goes wrong
with the cache is a typed miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from wcache.engine.client import Attachment, as_miss, attach_shard
from wcache.engine.options import Where
from wcache.engine.publish import Publication, begin
from wcache.engine.timing import Stopwatch
from wcache.errors import Busy, Miss, WcacheError
from wcache.log import MISSED, fields
from wcache.model import MissReason, Mode, Origin
from wcache.protocol.messages import Query
from wcache.weights.segment import Access

log = logging.getLogger(__name__)

_ROUNDS = 8  # of ask, find another writer, ask again
# A rank that answers so may still take what this engine loads. A generation that is gone was evicted while it was being
# handed out: if the shard is back by now, the rank answers a claim with that, and grants nothing.
_PUBLISHABLE = frozenset({
    MissReason.EMPTY, MissReason.LOADING, MissReason.CONTENT, MissReason.LAYOUT, MissReason.QUARANTINED,
    MissReason.GENERATION_GONE,
})  # fmt: skip
# A rank that answers so neither serves this engine nor takes anything from it, whatever else is asked.
POINTLESS = frozenset({
    MissReason.NO_DAEMON, MissReason.DENIED, MissReason.DEVICE, MissReason.DRAINING, MissReason.PROTOCOL,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """Which rank is asked and what for. `publish`: what is loaded may be given to the rank. `spec`: of a preload."""

    where: Where
    mode: Mode = Mode.ZERO_COPY
    publish: bool = True
    spec: str | None = None

    @property
    def origin(self) -> Origin:
        return Origin.ENGINE if self.spec is None else Origin.PRELOAD


def may_publish(publish: bool, mode: Mode) -> bool:
    """Whether what an engine loads is ever given to a rank; a copying engine keeps what it has to itself."""
    return publish and mode is not Mode.COPY


def look(
    query: Query, target: Target, *, access: Access | None = None, watch: Stopwatch | None = None
) -> Attachment | Miss:
    """Attach what `query` names, waiting for a publication in progress."""
    try:
        return attach_shard(
            query,
            target.where.path,
            mode=target.mode,
            wait_s=target.where.left_s,
            connect_timeout_s=target.where.connect_timeout_s,
            name=target.where.name,
            device=target.where.device,
            access=access,
            watch=watch,
        )
    except (WcacheError, OSError) as e:
        miss = as_miss(e).with_traceback(None)
        miss.__cause__ = miss.__context__ = None  # a miss is kept for as long as the model; frames would keep more
        return miss


def elect(
    miss: Miss, target: Target, claim: Callable[[], Publication | None], ask: Callable[[], Attachment | Miss]
) -> tuple[Attachment | Miss, Publication | None]:
    """After a miss: the right to publish, or an attachment if others published meanwhile, or the miss that stands.

    `claim`: the right to publish, None if it is resident by now. `ask`: attach, waiting for another writer.
    """
    if not may_publish(target.publish, target.mode):
        return miss, None
    for _ in range(_ROUNDS):
        if miss.reason not in _PUBLISHABLE:
            return miss, None
        try:
            publication = claim()
        except Busy as e:
            if target.where.left_s == 0:
                return as_miss(e), None
            publication = None
        except (WcacheError, OSError) as e:
            log.warning("this start will not be published: %s", e)
            return miss, None
        if publication is not None:
            return miss, publication
        found = ask()
        if isinstance(found, Attachment):
            return found, None
        miss = found
    return miss, None


def claim(query: Query, target: Target, bytes_total: int, *, wait_s: float = 0.0) -> Publication | None:
    """The right to be the single writer; None: it is resident already. `wait_s`: for another writer. Raises Busy."""
    return begin(
        query,
        target.where.path,
        origin=target.origin,
        bytes_total=bytes_total,
        spec=target.spec,
        name=target.where.name,
        device=target.where.device,
        wait_s=wait_s,
        connect_timeout_s=target.where.connect_timeout_s,
    )


def say_mapped(held: Attachment) -> None:
    """The line that operators grep after a hit."""
    log.info(
        "Mapped %d tensors from the weight cache daemon (%s mode)", len(held.manifest.tensors), held.mode,
        extra=fields(WCACHE_RANK=held.manifest.rank, WCACHE_FINGERPRINT=held.manifest.fingerprint.id),
    )  # fmt: skip


def say_missed(miss: Miss) -> None:
    """The line that operators grep after a miss."""
    log.warning(
        "Weight cache unusable (%s); falling back to disk loading", f"{miss.reason}: {miss}",
        extra=fields(MESSAGE_ID=MISSED, WCACHE_REASON=miss.reason),
    )  # fmt: skip


def release_copy(held: Attachment) -> None:
    """Copy mode: the tensors are private memory; the cache is freed unless somebody else holds it."""
    released = held.release(evict=True)
    if released is not None:
        what = "freed" if released.evicted else f"kept: {released.holders} other engines hold it"
        log.info("the weight cache was copied; the shard is %s", what)
