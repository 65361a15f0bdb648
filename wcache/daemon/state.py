# SPDX-License-Identifier: Apache-2.0
"""What a rank holds and who uses it: a pure state machine. No I/O, no clock, no descriptors, no threads.

Runs in the daemon behind one lock (`rank.py`). Events come in as method calls; a call answers with a decision
(`facts.py`) or raises the error that the client gets, and leaves effects for `take_effects()`. What the rank *is*
(`rank_state`) is never stored, only derived from facts. Surprising: memory freed here may live on in engines that map
it; a lease says that we keep our descriptors, not that others cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from wcache.daemon import invariants, matching
from wcache.daemon.facts import (
    Client,
    Drop,
    Effect,
    Forget,
    Found,
    Free,
    Grant,
    Lease,
    NotHere,
    Publication,
    Shard,
    Snapshot,
    Wait,
)
from wcache.daemon.invariants import BrokenInvariant
from wcache.daemon.preload import Preload
from wcache.errors import Busy, DeviceMismatch, Draining, NoSuchShard, ProtocolError, PublishError
from wcache.model import MissReason, Mode, Origin, RankState, ShardState
from wcache.protocol.messages import MissInfo, ProgressInfo, Query


class State:
    """All facts of one rank. `device`: None until it is known; `next_generation` grows over restarts."""

    def __init__(self, *, model: str | None, device: str | None, next_generation: int) -> None:
        self.preload = Preload(wanted=model is not None)
        self._device = device
        self._next = next_generation
        self._shards: dict[int, Shard] = {}
        self._publications: dict[int, Publication] = {}
        self._effects: list[Effect] = []
        self._started = False
        self._verifying = False
        self._draining = False
        self._misses: Counter[str] = Counter()
        self._last_miss: MissInfo | None = None
        self.moves = 0  # counts what moved: bytes, files, phases

    # --- what the rank is ---------------------------------------------------------------------------------------------

    @property
    def rank_state(self) -> RankState:
        if self._draining:
            return RankState.DRAINING
        if not self._started:
            return RankState.STARTING
        if self._verifying:
            return RankState.VERIFYING
        if self.preload.satisfied and not self.preload.loading:  # a loader that still ends still holds memory
            return RankState.READY
        return RankState.FAILED if self.preload.failed else RankState.LOADING

    @property
    def settled(self) -> bool:
        """True when the start is over: the weights are here, or the rank was drained and waits for none."""
        drained = self._draining and self.preload.satisfied and not self.preload.loading
        return drained or self.rank_state is RankState.READY

    @property
    def device(self) -> str | None:
        if self._device is not None:
            return self._device
        return next((s.device for s in self._shards.values() if s.held), None)

    @property
    def started(self) -> bool:
        """True once the fd store was read."""
        return self._started

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def busy(self) -> bool:
        """True while something is being published, loaded or verified."""
        return bool(self._publications) or self._verifying or self.preload.loading or not self._started

    def shard(self, generation: int) -> Shard | None:
        return self._shards.get(generation)

    def shards(self, prefix: str | None = None) -> list[Shard]:
        """Shards whose fingerprint begins with `prefix`, all without one. Raises NoSuchShard for none or several."""
        if prefix is None:
            return list(self._shards.values())
        if not prefix:
            raise NoSuchShard("an empty fingerprint names no shard", hint="name none at all to mean every shard")
        found = [s for s in self._shards.values() if s.id.startswith(prefix)]
        names = sorted({s.id for s in found})
        if not found:
            raise NoSuchShard(f"no resident shard has a fingerprint that begins with {prefix!r}")
        if len(names) > 1:
            raise NoSuchShard(f"{prefix!r} means {len(names)} shards: {', '.join(n[:16] for n in names)}")
        return found

    def has_lease(self, connection: int) -> bool:
        return any(connection in s.leases for s in self._shards.values())

    def has_publication(self, connection: int) -> bool:
        return connection in self._publications

    # --- start --------------------------------------------------------------------------------------------------------

    def restored(self, shards: Iterable[Shard], *, verify: bool) -> None:
        """The fd store was read. `verify`: nothing of it is served before `verified`."""
        for shard in shards:
            self._shards[shard.generation] = shard
            self._next = max(self._next, shard.generation + 1)
        self._started = True
        self._verifying = verify and bool(self._shards)

    def verification_over(self) -> None:
        self._verifying = False

    def adopt(self, generation: int, *, problem: str = "") -> None:
        """A resident shard is what the configuration asks for."""
        shard = self._shards[generation]
        shard.superseded = False
        self.preload.settle(generation, problem)
        self._supersede(s for s in self._shards.values() if s.origin is Origin.PRELOAD and s is not shard)

    # --- attach -------------------------------------------------------------------------------------------------------

    def attach(self, client: Client, query: Query, mode: Mode, now: float) -> Found | Wait | NotHere:
        answer = self.resolve(query, client.device)
        if isinstance(answer, Found):
            self._lease(self._shards[answer.generation], client, mode, now)
        return answer

    def resolve(self, query: Query, device: str | None) -> Found | Wait | NotHere:
        """What an attach would get, without a lease."""
        if self._draining:
            return NotHere(MissReason.DRAINING, "the rank is draining")
        named = matching.named(self._shards.values(), query)
        served = next((s for s in named if s.served), None)
        resident = self.device if served is None else served.device
        if device is not None and resident is not None and device != resident:
            return matching.wrong_device(device, resident, 0 if served is None else served.weight_bytes)
        if served is not None and not self._verifying:
            return Found(served.id, served.generation, served.segments, served.weight_bytes)
        return self._awaited(query) or self._missing(named, query)

    def _awaited(self, query: Query) -> Wait | None:
        """What is on its way and may be what the query wants."""
        for publication in self._publications.values():
            if matching.means(publication, query):
                return Wait(f"{publication.client.name} is publishing it", publication.progress)
        if not self._started:
            return Wait("the rank is starting", None)
        if self._verifying:
            return Wait("what was restored is being verified", None)
        if self.preload.undeclared:
            return Wait("the loader has not said yet what it loads", None)
        return None

    def _missing(self, named: list[Shard], query: Query) -> NotHere:
        if named:
            return NotHere(MissReason.QUARANTINED, f"shard {named[0].name} is quarantined: {named[0].problem}")
        answer = matching.miss(self._shards.values(), query)
        if answer.reason is MissReason.EMPTY and self._publications:
            return NotHere(MissReason.LOADING, "nothing is resident; something else is being published")
        if answer.reason is MissReason.EMPTY and self.preload.problem:
            return NotHere(MissReason.EMPTY, f"nothing is resident: {self.preload.problem}")
        return answer

    def reattach(
        self, client: Client, fingerprint: str, generation: int, mode: Mode, now: float
    ) -> Wait | NotHere | None:
        """Take up a lease again; None: it stands."""
        if not self._started:
            return Wait("the rank is starting", None)
        shard = self._shards.get(generation)
        if shard is None or shard.id != fingerprint or not shard.held:
            return NotHere(
                MissReason.GENERATION_GONE, f"generation {generation} of shard {fingerprint[:12]} is no longer here"
            )
        if not shard.served:
            return NotHere(MissReason.QUARANTINED, f"shard {shard.name} is quarantined: {shard.problem}")
        self._lease(shard, client, mode, now)
        return None

    def note_miss(self, client: Client | None, query: Query | None, answer: NotHere, now: float) -> None:
        """Remember a miss that an engine had."""
        self._misses[str(answer.reason)] += 1
        if client is None or query is None:
            return
        self._last_miss = MissInfo(
            when=now,
            engine=client.name,
            pid=client.pid,
            reason=answer.reason,
            message=answer.message,
            differences=answer.wire(),
            request=query,
        )

    def release(self, connection: int, fingerprint: str, *, evict: bool) -> tuple[bool, int]:
        """End a connection's lease on a shard. Returns (evicted, leases that still stand). Raises NoSuchShard.

        Only who took a private copy may have the shard freed, and only when nobody else holds it.
        """
        shard = next((s for s in self._shards.values() if s.id == fingerprint and connection in s.leases), None)
        if shard is None:
            raise NoSuchShard(f"this connection holds no lease on shard {fingerprint[:12]}")
        lease = shard.leases.pop(connection)
        holders = sum(len(s.leases) for s in self._shards.values() if s.id == fingerprint)
        if evict and holders == 0 and lease.mode is Mode.COPY:
            if self.preload.current == shard.generation:
                self.preload.release(f"the weights were released to {lease.client.name} (copy mode)")
            self._free(shard, f"released to {lease.client.name}")
            return True, 0
        self._settle(shard)
        return False, holders

    def disconnected(self, connection: int) -> Publication | None:
        """A connection ended: its leases end, its publication is void. Returns the publication, if there was one."""
        for shard in list(self._shards.values()):
            if shard.leases.pop(connection, None) is not None:
                self._settle(shard)
        return self._end_publication(connection)

    # --- publish ------------------------------------------------------------------------------------------------------

    def publish_begin(
        self, client: Client, query: Query, origin: Origin, spec: str | None, bytes_total: int, now: float
    ) -> Grant | Found | Wait:
        """Become the single writer. Raises PublishError, Draining, DeviceMismatch."""
        if client.connection in self._publications:
            raise PublishError("this connection is publishing already")
        if self._draining:
            raise Draining("the rank is draining")
        if not self._started:
            return Wait("the rank is starting", None)
        device = self.device
        if client.device is not None and device is not None and client.device != device:
            raise DeviceMismatch(f"the writer runs on device {client.device}, the rank is on {device}")
        preload = origin is Origin.PRELOAD
        if query.content is not None and not (preload and self.preload.reloading):
            served = next((s for s in matching.named(self._shards.values(), query) if s.served), None)
            if served is not None:
                if preload:
                    self.adopt(served.generation)
                return Found(served.id, served.generation, served.segments, served.weight_bytes)
        for other in self._publications.values():
            if matching.means(other, query):
                return Wait(f"{other.client.name} is publishing it", other.progress)
        generation = self._next
        self._next += 1
        publication = Publication(client, generation, query, origin, spec, bytes_total, now)
        self._publications[client.connection] = publication
        if preload:
            self.preload.declare()
        return Grant(generation)

    def publication(self, connection: int) -> Publication:
        publication = self._publications.get(connection)
        if publication is None:
            raise PublishError("this connection is publishing nothing")
        return publication

    def progress(self, client: Client, progress: ProgressInfo) -> None:
        """How far a writer is, or the loader before it begins to publish. Raises ProtocolError from anybody else."""
        publication = self._publications.get(client.connection)
        if publication is None and client.role != "loader":
            raise ProtocolError("progress of no publication")
        before = self.preload.progress if publication is None else publication.progress
        if before is None or _moved(before, progress):
            self.moves += 1
        if publication is None:
            self.preload.progress = progress
        else:
            publication.progress = progress

    def moved(self) -> None:
        """Something other than a publication made progress (a check, a wait for another rank's load)."""
        self.moves += 1

    def commit(self, connection: int, shard: Shard) -> None:
        """What was published is resident from now on; its descriptors are in the store."""
        publication = self.publication(connection)
        if shard.generation != publication.generation or shard.generation in self._shards:
            raise BrokenInvariant(f"commit of generation {shard.generation}, granted was {publication.generation}")
        self._end_publication(connection)
        self._shards[shard.generation] = shard
        if shard.origin is Origin.PRELOAD:
            self.adopt(shard.generation)
        elif self._is_current(shard.id):
            self.preload.settle(shard.generation, "")
        self._supersede(s for s in self._shards.values() if s.id == shard.id and s is not shard)

    def abort(self, connection: int) -> Publication:
        publication = self.publication(connection)
        self._end_publication(connection)
        return publication

    def _end_publication(self, connection: int) -> Publication | None:
        publication = self._publications.pop(connection, None)
        if publication is not None and publication.origin is Origin.PRELOAD:
            self.preload.declared = False
        return publication

    def _is_current(self, shard_id: str) -> bool:
        current = self._shards.get(self.preload.current) if self.preload.current is not None else None
        return current is not None and current.id == shard_id

    # --- evict, verify, reload, drain ---------------------------------------------------------------------------------

    def evict(self, prefix: str | None, *, force: bool) -> list[Free]:
        """Free shards. Raises NoSuchShard, and Busy naming the holders unless `force` takes their leases away."""
        shards = self.shards(prefix)
        held = [s for s in shards if s.leases]
        if held and not force:
            raise Busy(
                f"shard {held[0].name} is in use by {self._names(held)}",
                hint="stop them, or take it away with --force: they keep what they map, nobody else gets it",
                data={"holders": [lease.client.name for s in held for lease in s.leases.values()]},
            )
        return [self._evict(shard, "evicted") for shard in shards]

    def _evict(self, shard: Shard, why: str) -> Free:
        self._effects.extend(Drop(connection) for connection in shard.leases)
        shard.leases.clear()
        if self.preload.current == shard.generation:
            self.preload.release(f"the configured weights were {why}")
        return self._free(shard, why)

    def verified(self, generation: int, when: float) -> None:
        shard = self._shards.get(generation)
        if shard is not None:
            shard.verified = when

    def quarantine(self, generation: int, problem: str) -> Shard | None:
        """A shard's bytes cannot be trusted: not served, not restored; freed when nobody holds it; loaded anew."""
        shard = self._shards.get(generation)
        if shard is None or not shard.served:
            return None
        shard.state = ShardState.QUARANTINED
        shard.problem = problem
        self._effects.append(Forget(generation))
        if self.preload.current == generation:
            self.preload.current = None
            self.preload.order(reloading=False)
        self._settle(shard)
        return shard

    def reload(self) -> None:
        """Read the configured weights anew: in place of the old shard if nobody holds it, else beside it."""
        if not self.preload.wanted:
            raise NoSuchShard("no model is configured for this rank: there is nothing to reload")
        if self.preload.busy:
            raise Busy("the configured weights are being loaded already")
        self._draining = False
        current = None if self.preload.current is None else self._shards.get(self.preload.current)
        self.preload.order(reloading=True)
        if current is not None and not current.leases:
            self.preload.current = None
            self._free(current, "dropped to be read anew")

    def make_room(self, spec: str) -> list[Free]:
        """Free what loaders of other configurations left and nobody uses."""
        stale = [s for s in self._shards.values() if s.origin is Origin.PRELOAD and s.spec != spec and not s.leases]
        return [self._free(s, "of another configuration") for s in stale if s.generation != self.preload.current]

    def drain(self) -> None:
        if self._draining:
            raise Busy("the rank is draining already")
        self._draining = True

    @property
    def drained(self) -> bool:
        return self._draining and not self._publications and not any(s.leases for s in self._shards.values())

    def finish_drain(self) -> list[Free]:
        """Free everything; the rank stays as it is until a reload or a restart."""
        self.preload.release("drained")
        return [self._evict(shard, "drained") for shard in self.shards()]

    def give_up_drain(self) -> Busy:
        """The deadline passed: serve again. Returns the error that names who stood in the way."""
        self._draining = False
        writers = [p.client.name for p in self._publications.values()]
        names = [lease.client.name for s in self._shards.values() for lease in s.leases.values()] + writers
        text = self._names(self._shards.values()) or ", ".join(writers)
        return Busy(f"still in use by {text}", data={"holders": names})

    # --- observe ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        writers = sorted(self._publications.values(), key=lambda p: p.origin is not Origin.PRELOAD)
        quarantined = next((f"shard {s.name}: {s.problem}" for s in self._shards.values() if not s.served), "")
        held = [s for s in self._shards.values() if s.held]
        return Snapshot(
            shards=tuple(s.info() for s in self._shards.values()),
            progress=next((p.progress for p in writers if p.progress is not None), self.preload.progress),
            last_miss=self._last_miss,
            misses=dict(self._misses),
            problem=self.preload.problem or quarantined,
            attached=len({c for s in held for c in s.leases}),
            weight_bytes=sum(s.segment_bytes for s in held),
            note=self.preload.note,
        )

    def take_effects(self) -> list[Effect]:
        """What the events since the last call want done, in order."""
        effects, self._effects = self._effects, []
        return effects

    def check(self) -> None:
        """Raises BrokenInvariant. Cheap: called after every event."""
        invariants.check(self._shards, list(self._publications.values()), self.preload.current, self._next)

    # --- the small steps ----------------------------------------------------------------------------------------------

    def _lease(self, shard: Shard, client: Client, mode: Mode, now: float) -> None:
        shard.leases[client.connection] = Lease(client, now, mode)

    def _supersede(self, shards: Iterable[Shard]) -> None:
        for shard in list(shards):
            if shard.generation != self.preload.current:
                shard.superseded = True
                self._settle(shard)

    def _settle(self, shard: Shard) -> None:
        """After a lease ended or a shard lost its standing: free what nobody may or does use any more."""
        if shard.leases:
            return
        if shard.superseded:
            self._free(shard, "superseded by a newer shard")
        elif not shard.served and shard.held:
            shard.held = False
            self._effects.append(Free(shard.id, shard.generation, shard.segment_bytes, "quarantined"))

    def _free(self, shard: Shard, why: str) -> Free:
        del self._shards[shard.generation]
        free = Free(shard.id, shard.generation, shard.segment_bytes if shard.held else 0, why)
        if shard.held:
            self._effects.append(free)
        return free

    @staticmethod
    def _names(shards: Iterable[Shard]) -> str:
        found = [lease for s in shards for lease in s.leases.values()]
        return ", ".join(f"{lease.client.name} (pid {lease.client.pid or 'unknown'})" for lease in found)


def _moved(before: ProgressInfo, now: ProgressInfo) -> bool:
    return (before.phase, before.bytes_done, before.files_done) != (now.phase, now.bytes_done, now.files_done)
