# SPDX-License-Identifier: Apache-2.0
"""Errors are the same on both ends of the socket."""

from __future__ import annotations

import pytest

from wcache import errors
from wcache.model import CheckpointFault, Difference, MissReason
from wcache.protocol.messages import Failure, decode_reply, encode

SAMPLES: list[errors.WcacheError] = [
    errors.ConfigError("no"),
    errors.NoSuchRank("rank 7"),
    errors.CheckpointError(CheckpointFault.TRUNCATED, "16 bytes short", hint="download it again"),
    errors.StructureError("2 differences", ["a: shape", "b: missing"]),
    errors.Miss(MissReason.CONTENT, "other bytes", [Difference("checkpoint.content", "aa", "bb")]),
    errors.FdLimit("lost"),
    errors.InternalError("boom", "e-123"),
    errors.Unavailable("nobody"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: e.code)
def test_an_error_comes_back_as_the_same_class_with_the_same_words(error: errors.WcacheError) -> None:
    reply = decode_reply(encode(Failure.of(error)))
    assert isinstance(reply, Failure)
    back = reply.error()
    assert type(back) is type(error)
    assert (back.message, back.hint, back.data) == (error.message, error.hint, error.data)


def test_a_miss_keeps_its_reason_and_its_differences() -> None:
    back = Failure.of(SAMPLES[4]).error()
    assert isinstance(back, errors.Miss)
    assert back.reason is MissReason.CONTENT
    assert back.differences == (Difference("checkpoint.content", "aa", "bb"),)


def test_an_unknown_code_is_a_protocol_error_that_keeps_the_message() -> None:
    back = errors.from_wire("from_the_future", "something new", "", {})
    assert isinstance(back, errors.ProtocolError)
    assert "something new" in str(back)
    assert "from_the_future" in str(back)


def test_codes_are_unique_and_exit_statuses_are_the_documented_ones() -> None:
    classes = list(_tree(errors.WcacheError))
    assert len({c.code for c in classes}) == len(classes)
    assert {c.exit_status for c in classes} <= {1, 2, 3, 4}


def test_every_class_stands_in_the_drawing_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    missing = [c.__name__ for c in _tree(errors.WcacheError) if c.__name__ not in errors.__doc__]
    assert missing == []


def _tree(cls: type[errors.WcacheError]) -> list[type[errors.WcacheError]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _tree(c))]
