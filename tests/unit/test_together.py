# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one engine decide together, whatever each of them is told. Ranks are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wcache.engine import election, together
from wcache.engine.client import Attachment
from wcache.engine.election import Target
from wcache.engine.group import Group
from wcache.engine.options import Where
from wcache.errors import Busy, CheckpointError, ConfigError, Miss
from wcache.model import CheckpointFault, MissReason, Mode
from wcache.protocol.messages import Query
from wcache.weights.checkpoint import Survey
from wcache.weights.fingerprint import LayoutKey

A, B = "a" * 64, "b" * 64
EMPTY, NO_DAEMON = MissReason.EMPTY, MissReason.NO_DAEMON


class Ranks:
    """A group of threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._said: list[Sequence[int]] = [()] * size
        self._barrier = threading.Barrier(size, timeout=10)

    def run(self, one: Callable[[Group], Any]) -> list[Any]:
        """What `one` gives or raises on every rank; whoever calls the group more often than the others breaks it."""
        with ThreadPoolExecutor(self.size) as pool:
            return [f.exception() or f.result() for f in [pool.submit(one, self._group(r)) for r in range(self.size)]]

    def _group(self, rank: int) -> Group:
        group = Group(rank, self.size)
        group.gather = lambda values: self._gather(rank, values)  # type: ignore[method-assign]
        return group

    def _gather(self, rank: int, values: Sequence[int]) -> list[list[int]]:
        self._said[rank] = values
        self._barrier.wait()
        said = [list(v) for v in self._said]
        self._barrier.wait()
        return said


class Held(Attachment):
    def __init__(self, content: str) -> None:
        super().__init__(SimpleNamespace(fingerprint=SimpleNamespace(content=content)), None, None)  # type: ignore[arg-type]
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Asks(together.Request):
    """`identified`, `proven`: what hashing gives, or raises."""

    def identified(self, progress: Any = None) -> Asks:
        if self.query.content is not None:
            return self
        if self.survey is None:
            raise CheckpointError(CheckpointFault.TRUNCATED, "cut off")
        return Asks(Query(layout=self.query.layout, model="m", content=A), self.survey, "cpu")

    def proven(self, progress: Any = None) -> Asks:
        if self.survey is None:
            raise CheckpointError(CheckpointFault.CHANGED_WHILE_READING, "not what its name says")
        return self


def request(rank: int, size: int, content: str | None = A, *, damaged: bool = False) -> Asks:
    layout = LayoutKey(engine="e", engine_version="1", architecture="a", dtype="d", tp_size=size, tp_rank=rank)
    survey: Any = None if damaged else Survey(Path("m"), (), None, {}, {})
    return Asks(Query(layout=layout, model="m", content=content), survey, "cpu")


def target(**options: Any) -> Target:
    return Target(Where(Path("rank-0.sock"), "me", None, 1.0, time.monotonic() + 60), **options)


def miss(reason: MissReason) -> Miss:
    return Miss(reason, "no")


def attached(*told: Attachment | Miss, content: str | None = A, damaged: bool = False) -> tuple[list[Any], list[int]]:
    """What each rank comes away with when its daemon tells it this; how often each asked."""
    asked = [0] * len(told)

    def one(group: Group) -> Any:
        def ask(query: Query) -> Attachment | Miss:
            asked[group.rank] += 1
            return told[group.rank]

        return together.attach(request(group.rank, group.size, content, damaged=damaged), ask, group)

    return Ranks(len(told)).run(one), asked


def test_all_attach_the_same_checkpoint() -> None:
    told = [Held(A), Held(A)]
    found, asked = attached(*told)
    assert [f for _, f in found] == told and asked == [1, 1] and not any(t.closed for t in told)


def test_a_rank_without_its_shard_makes_the_others_give_theirs_back() -> None:
    first, last = Held(A), Held(A)
    found, _ = attached(first, miss(EMPTY), last)
    assert [f.reason for _, f in found] == [EMPTY] * 3 and first.closed and last.closed


def test_after_the_leaders_miss_nobody_else_asks() -> None:
    found, asked = attached(miss(NO_DAEMON), Held(A))
    assert [f.reason for _, f in found] == [NO_DAEMON] * 2 and asked == [1, 0]


def test_shards_of_two_checkpoints_are_not_mixed() -> None:
    told = [Held(A), Held(B)]
    found, _ = attached(*told)
    assert [f.reason for _, f in found] == [MissReason.CONTENT] * 2 and all(t.closed for t in told)


@pytest.mark.parametrize(("reason", "content"), [(EMPTY, A), (MissReason.CONTENT, A), (NO_DAEMON, None)])
def test_an_unknown_checkpoint_is_hashed_where_a_rank_could_use_that(reason: MissReason, content: str | None) -> None:
    found, asked = attached(miss(reason), miss(reason), content=None)
    assert [r.query.content for r, _ in found] == [content] * 2
    assert asked == [2 if content else 1, 0]


def test_a_checkpoint_that_cannot_be_hashed_is_a_miss_with_that_reason() -> None:
    found, _ = attached(miss(EMPTY), miss(EMPTY), content=None, damaged=True)
    assert [r.query.content for r, _ in found] == [None, None] and "cut off" in str(found[0][1])


def elected(
    monkeypatch: pytest.MonkeyPatch,
    *claims: Any,
    again: Sequence[Attachment | Miss] = (),
    contents: Sequence[str | None] = (),
    damaged: int | None = None,
    **options: Any,
) -> tuple[list[Any], list[float | None]]:
    """What becomes of ranks with a miss whose daemons answer a claim so (None: resident); how long each waits."""
    waits: list[float | None] = [None] * len(claims)

    def claim(query: Query, target: Target, size: int, *, wait_s: float = 0.0) -> Any:
        rank = query.layout.tp_rank
        waits[rank] = wait_s
        if isinstance(claims[rank], Exception):
            raise claims[rank]
        return claims[rank]

    monkeypatch.setattr(election, "claim", claim)
    content = contents or [A] * len(claims)

    def one(group: Group) -> Any:
        mine = request(group.rank, group.size, content[group.rank], damaged=group.rank == damaged)
        return together.elect(mine, target(**options), miss(EMPTY), lambda _: again[group.rank], group)

    return Ranks(len(claims)).run(one), waits


def test_all_become_writers_and_none_but_the_leader_decides_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found, waits = elected(monkeypatch, "mine", "mine too")
    assert [p for _, p in found] == ["mine", "mine too"] and all(w and w > 50 for w in waits)


def test_a_leader_that_may_not_publish_keeps_the_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, waits = elected(monkeypatch, Busy("another writer"), "mine")
    assert [p for _, p in found] == [None, None] and waits[1] is None


def test_what_others_published_meanwhile_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Held(A), Held(A)]
    found, _ = elected(monkeypatch, None, None, again=told)
    assert [f for f, _ in found] == told and [p for _, p in found] == [None, None]


def test_a_rank_that_lost_its_shard_publishes_anew_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    found, waits = elected(monkeypatch, None, "mine", again=[Held(A), miss(EMPTY)])
    assert [p for _, p in found] == [None, "mine"] and waits[1] == 0
    assert [f.reason for f, _ in found] == [EMPTY] * 2


@pytest.mark.parametrize("contents", [(A, B), (A, None), (None, None)])
def test_ranks_that_see_different_checkpoints_or_none_publish_nothing(
    contents: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, waits = elected(monkeypatch, "mine", "mine", contents=contents)
    assert [p for _, p in found] == [None, None] and waits == [None, None]


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_rank_whose_file_is_not_what_its_name_says_keeps_all_from_publishing(
    damaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, waits = elected(monkeypatch, "mine", "mine", damaged=damaged)
    assert [p for _, p in found] == [None, None] and waits == [None, None]


@pytest.mark.parametrize("options", [{"mode": Mode.COPY}, {"publish": False}])
@pytest.mark.parametrize("size", [1, 2])
def test_engines_that_do_not_publish_claim_nothing(
    size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, waits = elected(monkeypatch, *["mine"] * size, **options)
    assert [p for _, p in found] == [None] * size and waits == [None] * size


def test_a_failure_on_one_rank_is_its_own_error_there_and_a_miss_elsewhere() -> None:
    def make(rank: int) -> str:
        if rank == 1:
            raise ConfigError("wrong")
        return "made"

    found = Ranks(3).run(lambda group: together.on_all(lambda: make(group.rank), group))
    assert isinstance(found[1], ConfigError)
    assert [f"rank {1}" in str(found[i]) and isinstance(found[i], Miss) for i in (0, 2)] == [True, True]
    assert Ranks(2).run(lambda group: together.on_all(lambda: "made", group)) == ["made", "made"]
