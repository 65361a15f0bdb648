# SPDX-License-Identifier: Apache-2.0
"""Every message of the protocol, typed and checked by msgspec; msgpack on the wire, never pickle.

A client says `Hello`, the daemon answers `Welcome`; after that a connection asks one thing at a time. While the daemon
waits on a client's behalf it sends `Pending` so that silence always means trouble. `Failure` can answer anything.
Descriptors travel beside `Hit` (the manifest), `SegmentFds` and `PublishCommit` (the manifest).
"""

from __future__ import annotations

from typing import Any

import msgspec

from wcache.errors import ProtocolError, WcacheError, from_wire
from wcache.model import BackendName, IdentityPolicy, MissReason, Mode, Origin, RankState, ShardState
from wcache.weights.fingerprint import LayoutKey

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


# --- values inside messages -------------------------------------------------------------------------------------------


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client wants resident.

    `content`: hex SHA-256 of the checkpoint, None where it is not known without reading (`source` is given then) or
    not asked (`policy` trust). `source`: digest of the checkpoint files' stamps on this host; it only finds a
    publication in progress, never a hit. `model`: the directory or name, for people, and for `trust`.
    """

    layout: LayoutKey
    model: str
    content: str | None = None
    source: str | None = None
    policy: IdentityPolicy = IdentityPolicy.CONTENT


class WireDifference(msgspec.Struct, frozen=True, array_like=True):
    field: str
    asked: Any
    resident: Any


class LeaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One attached engine. `pid` as the daemon sees it, None for a peer of another pid namespace; `since`: epoch s."""

    name: str
    pid: int | None
    uid: int
    since: float
    mode: Mode


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One resident shard. Bytes: `weight_bytes` of tensors, `segment_bytes` of memory taken. `created`: epoch s.

    `dtype`: the one that most of its bytes have.
    """

    fingerprint: str
    content: str
    generation: int
    state: ShardState
    origin: Origin
    model: str
    dtype: str
    engine: str
    tensors: int
    weight_bytes: int
    segment_bytes: int
    segments: int
    created: float
    restored: bool
    verified: float | None
    leases: tuple[LeaseInfo, ...]
    layout: LayoutKey
    problem: str = ""


class MissInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A miss that an engine had. `request` lets `wcache explain` ask the same again."""

    when: float
    engine: str
    pid: int | None
    reason: MissReason
    message: str
    differences: tuple[WireDifference, ...]
    request: Query


class ProgressInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How far a publication is. `phase`: "identify", "load", "digest", ... ; bytes and files done and in total."""

    phase: str
    bytes_done: int = 0
    bytes_total: int = 0
    files_done: int = 0
    files_total: int = 0
    bytes_per_s: float = 0.0


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The one document behind `wcache status`, its --json, STATUS= and metrics."""

    rank: int
    state: RankState
    device: str
    backend: BackendName
    mode: Mode
    policy: IdentityPolicy
    model: str | None
    pid: int
    nonce: str
    version: str
    since: float
    text: str
    shards: tuple[ShardInfo, ...]
    progress: ProgressInfo | None = None
    last_miss: MissInfo | None = None
    misses: dict[str, int] = {}
    problem: str = ""
    fd_store: bool = False
    memory: dict[str, int] = {}  # bytes by what takes them: "weights", "used", "total", "engines", "others", ...
    rss: int = 0


# --- client to daemon -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message. `role`: "engine", "loader" or "admin". `name`: what `wcache status` shows. `device`: see model."""

    protocol: int
    role: str
    name: str
    version: str
    device: str | None = None


class Attach(Message, frozen=True, kw_only=True):
    """Answered by Hit + SegmentFds, or Failure(miss). `wait_s`: how long to wait for a publication in progress."""

    query: Query
    mode: Mode = Mode.ZERO_COPY
    wait_s: float = 0.0


class Reattach(Message, frozen=True, kw_only=True):
    """Take up the lease on a shard that is still mapped, after the daemon came back. Answered by Done or a miss."""

    fingerprint: str
    generation: int
    mode: Mode = Mode.ZERO_COPY


class Release(Message, frozen=True, kw_only=True):
    """End this connection's lease; with `evict`, free the shard if nobody else holds it. Answered by Released."""

    fingerprint: str
    evict: bool = False


class PublishBegin(Message, frozen=True, kw_only=True):
    """Become the single writer. Answered by Granted, Resident, or Failure(busy). `bytes_total`: segments' bytes."""

    query: Query
    origin: Origin
    bytes_total: int
    spec: str | None = None
    wait_s: float = 0.0


class Progress(Message, frozen=True, kw_only=True):
    """From the writer, at most a few times a second; not answered."""

    progress: ProgressInfo


class PublishSegments(Message, frozen=True, kw_only=True):
    """Up to MAX_FDS_PER_RECORD sealed segment fds beside it; `first` is the index of the first. Answered by Done."""

    first: int


class PublishCommit(Message, frozen=True, kw_only=True):
    """The manifest memfd beside it; names the content if the query could not. Answered by Committed."""


class PublishAbort(Message, frozen=True, kw_only=True):
    """The writer gives up; `reason` goes to the log and to `status`. Answered by Done."""

    reason: str


class GetStatus(Message, frozen=True, kw_only=True):
    """Answered by Status."""


class Explain(Message, frozen=True, kw_only=True):
    """Would this hit? Answered by Explained; takes no lease and counts as no miss."""

    query: Query


class Evict(Message, frozen=True, kw_only=True):
    """Free shards: one by (a unique prefix of) its fingerprint, or all. Answered by Evicted, Failure(busy)."""

    fingerprint: str | None = None
    force: bool = False


class Verify(Message, frozen=True, kw_only=True):
    """Recompute digests of resident shards. Answered by Pending..., then Verified."""

    fingerprint: str | None = None


class Reload(Message, frozen=True, kw_only=True):
    """Drop the configured shard and read it anew. Answered by Done at once; watch `status`."""


class Drain(Message, frozen=True, kw_only=True):
    """No new attaches; wait for leases to end, free everything. Answered by Pending..., then Done or Failure(busy)."""

    deadline_s: float


# --- daemon to client -------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """`nonce`: this incarnation of the daemon. `device`: the rank's device."""

    protocol: int
    version: str
    nonce: str
    rank: int
    device: str
    backend: BackendName


class Hit(Message, frozen=True, kw_only=True):
    """The manifest memfd beside it; SegmentFds records follow until `segments` fds have come."""

    fingerprint: str
    generation: int
    segments: int


class SegmentFds(Message, frozen=True, kw_only=True):
    first: int


class Granted(Message, frozen=True, kw_only=True):
    """`generation`: the number this publication will have."""

    generation: int


class Resident(Message, frozen=True, kw_only=True):
    """What was to be published is there already."""

    fingerprint: str
    generation: int


class Committed(Message, frozen=True, kw_only=True):
    fingerprint: str
    generation: int


class Released(Message, frozen=True, kw_only=True):
    """`evicted`: the shard was freed. `holders`: leases that still stand."""

    evicted: bool
    holders: int


class Status(Message, frozen=True, kw_only=True):
    status: RankStatus


class Explained(Message, frozen=True, kw_only=True):
    """`hit`: fingerprint of the shard that would be attached. Else the reason and the nearest shard's differences."""

    hit: str | None
    reason: MissReason | None = None
    message: str = ""
    differences: tuple[WireDifference, ...] = ()
    weight_bytes: int = 0


class Evicted(Message, frozen=True, kw_only=True):
    fingerprints: tuple[str, ...]
    bytes_freed: int


class ShardVerdict(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    ok: bool
    problem: str
    bytes_checked: int
    seconds: float


class Verified(Message, frozen=True, kw_only=True):
    verdicts: tuple[ShardVerdict, ...]


class Pending(Message, frozen=True, kw_only=True):
    """Still working on it."""

    text: str
    progress: ProgressInfo | None = None


class Done(Message, frozen=True, kw_only=True):
    text: str = ""


class Failure(Message, frozen=True, kw_only=True):
    """An error that travels; `WcacheError` on both ends."""

    code: str
    message: str
    hint: str = ""
    data: dict[str, Any] = {}

    @classmethod
    def of(cls, error: WcacheError) -> Failure:
        return cls(code=error.code, message=error.message, hint=error.hint, data=error.data)

    def error(self) -> WcacheError:
        return from_wire(self.code, self.message, self.hint, self.data)


ToDaemon = (
    Hello | Attach | Reattach | Release | PublishBegin | Progress | PublishSegments | PublishCommit | PublishAbort
    | GetStatus | Explain | Evict | Verify | Reload | Drain
)  # fmt: skip
ToClient = (
    Welcome | Hit | SegmentFds | Granted | Resident | Committed | Released | Status | Explained | Evicted | Verified
    | Pending | Done | Failure
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_to_daemon: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_request(record: bytes) -> ToDaemon:
    """Parse what a client sent. Raises ProtocolError."""
    try:
        return _to_daemon.decode(record)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ProtocolError(f"not a message: {e}") from e


def decode_reply(record: bytes) -> ToClient:
    """Parse what a daemon sent. Raises ProtocolError."""
    try:
        return _to_client.decode(record)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ProtocolError(f"not a message: {e}") from e
