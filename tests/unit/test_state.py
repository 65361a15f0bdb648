# SPDX-License-Identifier: Apache-2.0
"""The rank's state: what is served to whom; no order of events leaves a lease without memory, or memory unfreed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from wcache.daemon.facts import Client, Drop, Forget, Found, Free, Grant, NotHere, Shard, Wait
from wcache.daemon.matching import miss, named
from wcache.daemon.state import State
from wcache.errors import Busy, DeviceMismatch, Draining, NoSuchShard, ProtocolError, PublishError, WcacheError
from wcache.model import CPU, IdentityPolicy, MissReason, Mode, Origin, RankState, ShardState
from wcache.protocol.messages import ProgressInfo, Query
from wcache.weights.fingerprint import Fingerprint, LayoutKey

LAYOUT = LayoutKey(engine="e", engine_version="1", architecture="A", dtype="bfloat16")
NOW = 1000.0


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def query(
    text: str = "a", *, known: bool = True, source: str | None = None, policy: str = "content", **layout: object
) -> Query:
    return Query(
        layout=msgspec.structs.replace(LAYOUT, **layout),
        model=f"/m/{text}",
        content=sha(text) if known else None,
        source=source,
        policy=IdentityPolicy(policy),
    )


def client(number: int, *, role: str = "engine", device: str | None = None) -> Client:
    return Client(number, f"client{number}", role, number, 0, device)


def shard(
    asked: Query, generation: int, origin: Origin = Origin.ENGINE, text: str = "a", spec: str | None = None
) -> Shard:
    fingerprint = Fingerprint(asked.content or sha(text), asked.layout)
    return Shard(fingerprint, fingerprint.id, generation, origin, spec, asked.model, CPU, 1, 10, 4096, 1, NOW)


def fresh(model: str | None = None) -> State:
    state = State(model=model, device=CPU, next_generation=1)
    state.restored([], verify=False)
    return state


def add(state: State, asked: Query, number: int = 100, origin: Origin = Origin.ENGINE) -> int:
    granted = state.publish_begin(client(number), asked, origin, None, 1, NOW)
    assert isinstance(granted, Grant)
    state.commit(number, shard(asked, granted.generation, origin))
    return granted.generation


def attach(state: State, asked: Query, number: int = 1, mode: Mode = Mode.ZERO_COPY) -> Found | Wait | NotHere:
    return state.attach(client(number), asked, mode, NOW)


def reason(answer: Found | Wait | NotHere) -> MissReason:
    assert isinstance(answer, NotHere)
    return answer.reason


# --- hits and misses --------------------------------------------------------------------------------------------------


def test_an_empty_rank_misses_with_empty() -> None:
    assert reason(attach(fresh(), query())) is MissReason.EMPTY


def test_equal_content_and_layout_hit() -> None:
    state = fresh()
    generation = add(state, query())
    found = attach(state, query())
    assert isinstance(found, Found)
    assert found.generation == generation
    assert state.has_lease(1)


def test_other_content_alone_is_a_content_miss_that_shows_both() -> None:
    state = fresh()
    add(state, query("a"))
    answer = attach(state, query("b"))
    assert reason(answer) is MissReason.CONTENT
    assert isinstance(answer, NotHere)
    (difference,) = answer.differences
    assert (difference.asked, difference.resident) == (sha("b"), sha("a"))


def test_a_layout_miss_names_the_fields_against_the_nearest_shard() -> None:
    state = fresh()
    add(state, query("a", tp_size=8, dtype="float16"))
    add(state, query("b", tp_size=2), 101)
    answer = attach(state, query("b", tp_size=4))
    assert reason(answer) is MissReason.LAYOUT
    assert isinstance(answer, NotHere)
    assert [(d.field, d.asked, d.resident) for d in answer.differences] == [("layout.tp_size", 4, 2)]


@pytest.mark.parametrize("field", [f for f in LAYOUT.__struct_fields__])
def test_every_field_of_the_layout_decides(field: str) -> None:
    values: dict[str, object] = {
        "quantization": {"bits": 4}, "rope": {"theta": 1.0}, "kernel_backends": {"moe": "x"}, "environment": {"A": "1"},
        "extra": {"x": [1]},
    }  # fmt: skip
    other = values.get(field, 7 if isinstance(getattr(LAYOUT, field), int) or field == "max_model_len" else "other")
    state = fresh()
    add(state, query())
    answer = attach(state, query(**{field: other}))
    assert reason(answer) is MissReason.LAYOUT
    assert isinstance(answer, NotHere)
    assert all(d.field.startswith(f"layout.{field}") for d in answer.differences)


def test_an_engine_on_another_device_misses_with_both_devices() -> None:
    state = fresh()
    add(state, query())
    answer = state.attach(client(1, device="GPU-1"), query(), Mode.ZERO_COPY, NOW)
    assert reason(answer) is MissReason.DEVICE
    with pytest.raises(DeviceMismatch):
        state.publish_begin(client(2, device="GPU-1"), query("b"), Origin.ENGINE, None, 1, NOW)


def test_a_source_finds_a_publication_and_never_a_shard() -> None:
    state = fresh()
    asked = query(known=False, source="stamps")
    granted = state.publish_begin(client(9), asked, Origin.ENGINE, None, 1, NOW)
    assert isinstance(granted, Grant)
    assert isinstance(attach(state, asked), Wait)
    assert not isinstance(attach(state, query("other", source="others")), Wait)
    state.commit(9, shard(asked, granted.generation))
    assert reason(attach(state, asked)) is MissReason.CONTENT


def test_contents_that_differ_do_not_match_whatever_their_source() -> None:
    state = fresh()
    state.publish_begin(client(9), query("a", source="s"), Origin.ENGINE, None, 1, NOW)
    assert isinstance(attach(state, query("a", source="x")), Wait)
    assert not isinstance(attach(state, query("b", source="s")), Wait)


def test_trust_hits_by_label_and_layout_if_exactly_one_shard_fits() -> None:
    state = fresh()
    add(state, query("a"))
    asked = query("a", known=False, policy="trust")
    assert isinstance(attach(state, msgspec.structs.replace(asked, model="/m//a/")), Found)
    assert not isinstance(attach(state, msgspec.structs.replace(asked, policy=IdentityPolicy.CONTENT)), Found)
    assert not isinstance(attach(state, query("a", known=False, policy="trust", tp_size=2)), Found)
    twin = msgspec.structs.replace(query("b"), model="/m/a")
    add(state, twin, 101)
    assert not isinstance(attach(state, asked), Found)


def test_misses_are_remembered_with_their_request() -> None:
    state = fresh()
    add(state, query("a"))
    answer = attach(state, query("b"))
    assert isinstance(answer, NotHere)
    state.note_miss(client(1), query("b"), answer, NOW)
    snapshot = state.snapshot()
    assert snapshot.misses == {"checkpoint_content": 1}
    assert snapshot.last_miss is not None
    assert snapshot.last_miss.request == query("b")
    assert snapshot.last_miss.differences[0].field == "checkpoint.content"


# --- publications -----------------------------------------------------------------------------------------------------


def test_one_writer_at_a_time_others_wait_and_then_find_it_resident() -> None:
    state = fresh()
    granted = state.publish_begin(client(1), query(), Origin.ENGINE, None, 1, NOW)
    assert isinstance(granted, Grant)
    assert isinstance(state.publish_begin(client(2), query(), Origin.ENGINE, None, 1, NOW), Wait)
    with pytest.raises(PublishError):
        state.publish_begin(client(1), query("b"), Origin.ENGINE, None, 1, NOW)
    state.commit(1, shard(query(), granted.generation))
    assert isinstance(state.publish_begin(client(2), query(), Origin.ENGINE, None, 1, NOW), Found)


def test_a_writer_that_ends_leaves_nothing() -> None:
    state = fresh()
    state.publish_begin(client(1), query(), Origin.ENGINE, None, 1, NOW)
    assert state.disconnected(1) is not None
    assert isinstance(state.publish_begin(client(2), query(), Origin.ENGINE, None, 1, NOW), Grant)


def test_progress_counts_only_what_moves() -> None:
    state = fresh()
    state.publish_begin(client(1), query(), Origin.ENGINE, None, 1, NOW)
    for done in (1, 1, 1, 2):
        state.progress(client(1), ProgressInfo(phase="load", bytes_done=done, bytes_total=9))
    assert state.moves == 2
    with pytest.raises(ProtocolError):
        state.progress(client(2), ProgressInfo(phase="load"))


def test_a_loader_shows_its_progress_before_it_publishes() -> None:
    state = fresh("/m")
    state.preload.started()
    info = ProgressInfo(phase="identify", bytes_done=1, bytes_total=9)
    state.progress(client(1, role="loader"), info)
    assert (state.snapshot().progress, state.moves) == (info, 1)
    state.publish_begin(client(2, role="loader"), query(), Origin.PRELOAD, None, 1, NOW)
    assert state.snapshot().progress is None


# --- standing ---------------------------------------------------------------------------------------------------------


def test_a_new_preload_replaces_the_old_one_when_its_last_lease_ends() -> None:
    state = fresh("/m")
    old = add(state, query("old"), origin=Origin.PRELOAD)
    attach(state, query("old"), 1)
    new = add(state, query("new"), 101, Origin.PRELOAD)
    assert state.take_effects() == []
    assert state.rank_state is RankState.READY
    state.disconnected(1)
    (free,) = state.take_effects()
    assert isinstance(free, Free)
    assert free.generation == old
    assert [s.generation for s in state.shards()] == [new]


def test_quarantine_ends_service_at_once_and_memory_with_the_last_lease() -> None:
    state = fresh("/m")
    generation = add(state, query(), origin=Origin.PRELOAD)
    attach(state, query(), 1)
    state.quarantine(generation, "digest")
    assert state.take_effects() == [Forget(generation)]
    assert isinstance(attach(state, query(), 2), Wait)  # it is to be loaded anew
    assert state.rank_state is RankState.LOADING
    state.disconnected(1)
    assert [type(e) for e in state.take_effects()] == [Free]
    (info,) = state.snapshot().shards
    assert (info.state, info.segment_bytes) == (ShardState.QUARANTINED, 0)
    add(state, query(), 102, Origin.PRELOAD)
    assert [s.state for s in state.shards()] == [ShardState.RESIDENT]


def test_an_old_generation_is_gone() -> None:
    state = fresh()
    generation = add(state, query())
    found = state.shards()[0]
    assert state.reattach(client(1), found.id, generation, Mode.ZERO_COPY, NOW) is None
    answer = state.reattach(client(2), found.id, generation + 1, Mode.ZERO_COPY, NOW)
    assert isinstance(answer, NotHere)
    assert answer.reason is MissReason.GENERATION_GONE


def test_before_the_fd_store_was_read_everybody_waits() -> None:
    state = State(model=None, device=CPU, next_generation=1)
    assert state.rank_state is RankState.STARTING
    assert isinstance(attach(state, query()), Wait)
    assert isinstance(state.reattach(client(1), "x", 1, Mode.ZERO_COPY, NOW), Wait)
    assert isinstance(state.publish_begin(client(1), query(), Origin.ENGINE, None, 1, NOW), Wait)


def test_what_is_restored_is_not_served_before_it_was_verified() -> None:
    state = State(model=None, device=None, next_generation=1)
    state.restored([shard(query(), 5)], verify=True)
    assert state.rank_state is RankState.VERIFYING
    assert isinstance(attach(state, query()), Wait)
    state.verification_over()
    assert state.rank_state is RankState.READY
    assert isinstance(attach(state, query()), Found)
    assert isinstance(state.publish_begin(client(1), query("b"), Origin.ENGINE, None, 1, NOW), Grant)


def test_release_frees_only_for_a_copy_and_only_the_last() -> None:
    state = fresh()
    add(state, query())
    name = state.shards()[0].id
    attach(state, query(), 1, Mode.COPY)
    attach(state, query(), 2)
    assert state.release(1, name, evict=True) == (False, 1)
    assert state.release(2, name, evict=True) == (False, 0)
    attach(state, query(), 3, Mode.COPY)
    assert state.release(3, name, evict=True) == (True, 0)
    with pytest.raises(NoSuchShard):
        state.release(3, name, evict=True)


def test_evict_names_holders_and_by_force_drops_them() -> None:
    state = fresh()
    add(state, query("a"))
    add(state, query("b"), 101)
    attach(state, query("a"), 1)
    with pytest.raises(Busy, match="client1"):
        state.evict(None, force=False)
    assert len(state.evict(None, force=True)) == 2
    assert Drop(1) in state.take_effects()


def test_a_prefix_must_mean_one_shard() -> None:
    state = fresh()
    add(state, query("b"))
    add(state, query("c"), 101)
    with pytest.raises(NoSuchShard, match="means 2"):
        state.shards("5")  # how both fingerprints begin
    with pytest.raises(NoSuchShard, match="begins with"):
        state.shards("zz")
    full = state.shards()[0].id
    assert [s.id for s in state.shards(full[:20])] == [full]


def test_a_reload_drops_first_unless_somebody_holds_it() -> None:
    state = fresh("/m")
    add(state, query(), origin=Origin.PRELOAD)
    state.reload()
    assert state.rank_state is RankState.LOADING
    assert [type(e) for e in state.take_effects()] == [Free]
    with pytest.raises(Busy):
        state.reload()
    add(state, query(), 101, Origin.PRELOAD)
    attach(state, query(), 1)
    state.reload()
    assert state.rank_state is RankState.READY
    assert isinstance(state.publish_begin(client(7), query(), Origin.PRELOAD, None, 1, NOW), Grant)


def test_draining_refuses_what_is_new_and_ends_empty() -> None:
    state = fresh()
    add(state, query())
    attach(state, query(), 1)
    state.drain()
    assert reason(attach(state, query(), 2)) is MissReason.DRAINING
    with pytest.raises(Draining):
        state.publish_begin(client(3), query("b"), Origin.ENGINE, None, 1, NOW)
    assert not state.drained
    state.disconnected(1)
    assert state.drained
    assert len(state.finish_drain()) == 1
    assert state.rank_state is RankState.DRAINING


def test_the_nearest_shard_is_pure_arithmetic() -> None:
    assert miss([], query()).reason is MissReason.EMPTY
    assert named([shard(query(), 1), shard(query(), 2)], query())[0].generation == 2


# --- any order of events ----------------------------------------------------------------------------------------------

CONNECTIONS = st.integers(1, 6)
TEXTS = st.sampled_from("abc")


class AnyOrder(RuleBasedStateMachine):
    """Six connections do anything in any order; a model of the store carries the effects out."""

    @initialize(model=st.sampled_from([None, "/m"]), restored=st.lists(TEXTS, max_size=3), verify=st.booleans())
    def start(self, model: str | None, restored: list[str], verify: bool) -> None:
        self.state = State(model=model, device=CPU, next_generation=50)
        shards = [shard(query(t), i + 1, Origin.PRELOAD if i % 2 else Origin.ENGINE) for i, t in enumerate(restored)]
        self.stored = {s.generation for s in shards}
        self.held = set(self.stored)
        self.dropped: set[int] = set()
        self.state.restored(shards, verify=verify)

    @contextmanager
    def event(self) -> Iterator[State]:
        try:
            yield self.state
        except WcacheError:
            pass
        for effect in self.state.take_effects():
            if isinstance(effect, Free):
                self.held.remove(effect.generation)  # KeyError: freed twice
                self.stored.discard(effect.generation)
            elif isinstance(effect, Forget):
                self.stored.remove(effect.generation)
            else:
                self.dropped.add(effect.connection)
        for connection in self.dropped:
            self.state.disconnected(connection)
        self.dropped.clear()

    @rule(c=CONNECTIONS, t=TEXTS, mode=st.sampled_from(Mode))
    def attach(self, c: int, t: str, mode: Mode) -> None:
        with self.event() as state:
            answer = attach(state, query(t), c, mode)
            assert not isinstance(answer, Found) or answer.generation in self.held

    @rule(c=CONNECTIONS, t=TEXTS, known=st.booleans(), origin=st.sampled_from(Origin))
    def begin(self, c: int, t: str, known: bool, origin: Origin) -> None:
        with self.event() as state:
            state.publish_begin(client(c), query(t, known=known, source=t), origin, None, 1, NOW)

    @rule(c=CONNECTIONS)
    def commit(self, c: int) -> None:
        with self.event() as state:
            publication = state.publication(c)
            text = publication.query.model[-1]
            new = shard(publication.query, publication.generation, publication.origin, text)
            self.held.add(new.generation)  # the store takes the descriptors before the state learns of them
            self.stored.add(new.generation)
            state.commit(c, new)

    @rule(c=CONNECTIONS)
    def leave(self, c: int) -> None:
        with self.event() as state:
            state.disconnected(c)

    @rule(c=CONNECTIONS)
    def abort(self, c: int) -> None:
        with self.event() as state:
            state.abort(c)

    @rule(c=CONNECTIONS, t=TEXTS, evict=st.booleans())
    def release(self, c: int, t: str, evict: bool) -> None:
        with self.event() as state:
            state.release(c, Fingerprint(sha(t), LAYOUT).id, evict=evict)

    @rule(c=CONNECTIONS, t=TEXTS, generation=st.integers(1, 60))
    def reattach(self, c: int, t: str, generation: int) -> None:
        with self.event() as state:
            state.reattach(client(c), Fingerprint(sha(t), LAYOUT).id, generation, Mode.ZERO_COPY, NOW)

    @rule(t=st.none() | TEXTS, force=st.booleans())
    def evict(self, t: str | None, force: bool) -> None:
        with self.event() as state:
            state.evict(None if t is None else Fingerprint(sha(t), LAYOUT).id, force=force)

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        if self.state.shards():
            with self.event() as state:
                state.quarantine(data.draw(st.sampled_from([s.generation for s in state.shards()])), "spoilt")

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        served = [s.generation for s in self.state.shards() if s.served]
        if served:
            with self.event() as state:
                state.adopt(data.draw(st.sampled_from(served)))

    @rule()
    def reload(self) -> None:
        with self.event() as state:
            state.reload()

    @rule(failed=st.booleans())
    def load(self, failed: bool) -> None:
        with self.event() as state:
            state.preload.started()
            state.preload.fail("no") if failed else state.preload.ended()

    @rule()
    def verified(self) -> None:
        with self.event() as state:
            state.verification_over()

    @rule()
    def drain(self) -> None:
        with self.event() as state:
            state.drain()

    @rule()
    def end_drain(self) -> None:
        with self.event() as state:
            if state.drained:
                state.finish_drain()
            elif state.draining:
                state.give_up_drain()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "held"):
            return
        self.state.check()
        shards = self.state.shards()
        assert {s.generation for s in shards if s.held} == self.held
        assert {s.generation for s in shards if s.served} == self.stored
        assert all(not s.leases or s.held for s in shards)
        served = [s.id for s in shards if s.served and not s.superseded]
        assert len(served) == len(set(served)) or any(s.generation < 50 for s in shards)
        assert self.state.rank_state in RankState
        self.state.snapshot()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
