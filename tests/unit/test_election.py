# SPDX-License-Identifier: Apache-2.0
"""Of engines that start cold together one publishes: what each of them does about what the rank answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wcache.engine.client import Attachment
from wcache.engine.election import POINTLESS, Target, elect
from wcache.engine.options import Where
from wcache.errors import Busy, Miss, Unavailable
from wcache.model import MissReason, Mode

EMPTY = Miss(MissReason.EMPTY, "nothing is resident")
RIGHT: Any = object()  # a Publication, as far as an election is concerned
HELD = Attachment(None, None, None)  # type: ignore[arg-type]


def target(*, mode: Mode = Mode.ZERO_COPY, publish: bool = True, left_s: float = 60.0) -> Target:
    return Target(Where(Path("rank-0.sock"), "me", None, 1.0, time.monotonic() + left_s), mode, publish)


def answers(*what: Any) -> Callable[[], Any]:
    """Gives these one after the other, raises those that are errors, and refuses to be asked once more."""
    left: Iterator[Any] = iter(what)

    def answer() -> Any:
        given = next(left, AssertionError("asked too often"))
        if isinstance(given, Exception) and not isinstance(given, Miss):
            raise given
        return given

    return answer


@pytest.mark.parametrize(
    "reason",
    ["empty", "loading", "checkpoint_content", "layout", "quarantined", "generation_gone"],
)
def test_a_rank_without_the_shard_takes_what_this_engine_loads(reason: str) -> None:
    miss = Miss(MissReason(reason), "not here")
    assert elect(miss, target(), answers(RIGHT), answers()) == (miss, RIGHT)


@pytest.mark.parametrize(
    "reason", [*sorted(POINTLESS), MissReason.STRUCTURE, MissReason.UNSUPPORTED, MissReason.DEADLINE]
)
def test_a_rank_that_takes_nothing_is_not_asked(reason: MissReason) -> None:
    miss = Miss(reason, "no")
    assert elect(miss, target(), answers(), answers()) == (miss, None)


@pytest.mark.parametrize("options", [{"mode": Mode.COPY}, {"publish": False}])
def test_an_engine_that_does_not_publish_does_not_claim(options: dict[str, Any]) -> None:
    assert elect(EMPTY, target(**options), answers(), answers()) == (EMPTY, None)


def test_a_shard_that_was_evicted_and_is_back_already_is_attached_not_published() -> None:
    gone = Miss(MissReason.GENERATION_GONE, "no longer here")
    assert elect(gone, target(), answers(None), answers(HELD)) == (HELD, None)


def test_while_another_engine_publishes_this_one_waits_and_attaches() -> None:
    assert elect(EMPTY, target(), answers(Busy("other is publishing it")), answers(HELD)) == (HELD, None)


def test_a_writer_that_dies_is_succeeded_by_whoever_waited_for_it() -> None:
    again = Miss(MissReason.EMPTY, "nothing is resident: the writer died")
    assert elect(EMPTY, target(), answers(Busy("busy"), RIGHT), answers(again)) == (again, RIGHT)


def test_an_engine_whose_time_is_over_waits_for_nobody() -> None:
    found, right = elect(EMPTY, target(left_s=0.0), answers(Busy("other is publishing it")), answers())
    assert isinstance(found, Miss) and found.reason is MissReason.BUSY and right is None


def test_a_rank_that_dies_before_the_claim_costs_the_publication_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert elect(EMPTY, target(), answers(Unavailable("rank-0.sock: no daemon")), answers()) == (EMPTY, None)
    assert "this start will not be published: rank-0.sock: no daemon" in caplog.text


def test_an_engine_that_finds_a_new_writer_every_time_ends_with_the_disk() -> None:
    asked = 0

    def claim() -> None:
        nonlocal asked
        asked += 1
        raise Busy("busy")

    assert elect(EMPTY, target(), claim, lambda: EMPTY) == (EMPTY, None)
    assert asked > 1
