# SPDX-License-Identifier: Apache-2.0
"""Messages: typed, checked, never anything but a ProtocolError on bad input."""

from __future__ import annotations

import pickle  # noqa: TID251  (what an attacker would send)
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import ProtocolError
from wcache.protocol import messages as m
from wcache.weights.fingerprint import LayoutKey

QUERY = m.Query(layout=LayoutKey(engine="e", engine_version="1", architecture="A", dtype="d"), model="/m", content="c")


@pytest.mark.parametrize(
    "message",
    [
        m.Hello(protocol=1, role="engine", name="n", version="0"),
        m.Attach(query=QUERY, wait_s=3.0),
        m.Evict(),
        m.Progress(progress=m.ProgressInfo(phase="load", bytes_done=1)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_request_survives_the_wire(message: m.ToDaemon) -> None:
    assert m.decode_request(m.encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error_and_nothing_else(data: bytes) -> None:
    for decode in (m.decode_request, m.decode_reply):
        try:
            decode(data)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "record",
    [
        pickle.dumps({"cmd": "attach"}),
        msgspec.msgpack.encode({"type": "Attach"}),
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Evict", "forse": True}),
        b"\x91" * 100_000,
    ],
    ids=["pickle", "incomplete", "unknown", "unknown-field", "deep"],
)
def test_what_is_no_message_is_refused(record: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode_request(record)


def test_a_reply_is_not_taken_for_a_request() -> None:
    with pytest.raises(ProtocolError):
        m.decode_request(m.encode(m.Done()))


def test_no_tag_is_used_in_both_directions() -> None:
    assert not {c.__name__ for c in get_args(m.ToDaemon)} & {c.__name__ for c in get_args(m.ToClient)}
