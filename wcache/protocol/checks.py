# SPDX-License-Identifier: Apache-2.0
"""What the daemon and its checker child say to each other over a socketpair: recompute the digests of these segments.

SEQPACKET records, msgpack, descriptors beside `Segments`; the same framing as the rank's socket.
"""

from __future__ import annotations

import msgspec

from wcache.errors import ProtocolError
from wcache.model import BackendName


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """`sizes`: bytes in use of each segment, in order. `threads`: at most so many segments at once. `nice`: nice(2)."""

    backend: BackendName
    device: str
    sizes: tuple[int, ...]
    threads: int = 1
    nice: int = 0


class Segments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """Up to MAX_FDS_PER_RECORD descriptors beside it, from segment `first` on."""

    first: int


class SegmentDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """ "algorithm:hex" of one segment as it is now."""

    index: int
    digest: str


class CheckFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """`code` is that of a WcacheError: "segment" condemns the segments, anything else only the attempt."""

    code: str
    message: str


ToChecker = CheckRequest | Segments
FromChecker = SegmentDigest | CheckFailed

_to: msgspec.msgpack.Decoder[ToChecker] = msgspec.msgpack.Decoder(ToChecker)
_from: msgspec.msgpack.Decoder[FromChecker] = msgspec.msgpack.Decoder(FromChecker)


def encode(message: ToChecker | FromChecker) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_checker(record: bytes) -> ToChecker:
    """Raises ProtocolError."""
    try:
        return _to.decode(record)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a message to a checker: {e}") from e


def decode_from_checker(record: bytes) -> FromChecker:
    """Raises ProtocolError."""
    try:
        return _from.decode(record)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a message of a checker: {e}") from e
