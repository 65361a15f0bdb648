# SPDX-License-Identifier: Apache-2.0
"""The nouns of a rank's state: shards, leases, publications, and what is to be done after an event.

Plain values for the state machine in `state.py`; no I/O, no descriptors (those are the store's, by generation).
A connection is a number; who is behind it is a `Client`.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field

from wcache.model import Difference, MissReason, Mode, Origin, ShardState
from wcache.protocol.messages import LeaseInfo, MissInfo, ProgressInfo, Query, ShardInfo, WireDifference
from wcache.weights.fingerprint import Fingerprint
from wcache.weights.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Client:
    """Who a connection belongs to. `device`: where the engine wants to use the weights, None if it did not say."""

    connection: int
    name: str
    role: str
    pid: int | None
    uid: int
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    client: Client
    since: float  # seconds since the epoch
    mode: Mode


@dataclass(slots=True)
class Shard:
    """One shard. `held`: its descriptors are in the store; a quarantined one is kept as a record after they went.

    `superseded`: a newer one has taken its place; it goes with its last lease.
    """

    fingerprint: Fingerprint
    id: str
    generation: int
    origin: Origin
    spec: str | None
    model: str
    device: str
    tensors: int
    weight_bytes: int
    segment_bytes: int
    segments: int
    created: float
    dtype: str = ""
    restored: bool = False
    state: ShardState = ShardState.RESIDENT
    held: bool = True
    superseded: bool = False
    verified: float | None = None
    problem: str = ""
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        return self.state is ShardState.RESIDENT

    @property
    def name(self) -> str:
        """Short, for people and for the fd store."""
        return self.id[:12]

    def info(self) -> ShardInfo:
        layout = self.fingerprint.layout
        return ShardInfo(
            fingerprint=self.id,
            content=self.fingerprint.content,
            generation=self.generation,
            state=self.state,
            origin=self.origin,
            model=self.model,
            dtype=self.dtype,
            engine=f"{layout.engine} {layout.engine_version}",
            tensors=self.tensors,
            weight_bytes=self.weight_bytes,
            segment_bytes=self.segment_bytes if self.held else 0,
            segments=self.segments if self.held else 0,
            created=self.created,
            restored=self.restored,
            verified=self.verified,
            leases=tuple(lease_info(lease) for lease in self.leases.values()),
            layout=layout,
            problem=self.problem,
        )


def lease_info(lease: Lease) -> LeaseInfo:
    client = lease.client
    return LeaseInfo(name=client.name, pid=client.pid, uid=client.uid, since=lease.since, mode=lease.mode)


def shard_of(manifest: Manifest, generation: int, *, restored: bool = False) -> Shard:
    """The record of a shard, from its manifest (which is then no longer needed)."""
    return Shard(
        fingerprint=manifest.fingerprint,
        id=manifest.fingerprint.id,
        generation=generation,
        origin=manifest.origin,
        spec=manifest.spec,
        model=manifest.model,
        device=manifest.device,
        tensors=len(manifest.tensors),
        weight_bytes=manifest.weight_bytes,
        segment_bytes=manifest.segment_bytes,
        segments=len(manifest.segments),
        created=manifest.created,
        dtype=manifest.dtype,
        restored=restored,
    )


@dataclass(slots=True)
class Publication:
    """A writer at work, from PublishBegin to its commit or its end."""

    client: Client
    generation: int
    query: Query
    origin: Origin
    spec: str | None
    bytes_total: int
    started: float
    progress: ProgressInfo | None = None


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A shard to serve, or one that is there already."""

    id: str
    generation: int
    segments: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again when something has changed: what is wanted may be on its way."""

    text: str
    progress: ProgressInfo | None


@dataclass(frozen=True, slots=True)
class NotHere:
    """A miss. `weight_bytes`: of the nearest shard, 0 if there is none."""

    reason: MissReason
    message: str
    differences: tuple[Difference, ...] = ()
    weight_bytes: int = 0

    def wire(self) -> tuple[WireDifference, ...]:
        return tuple(WireDifference(d.field, d.asked, d.resident) for d in self.differences)


@dataclass(frozen=True, slots=True)
class Grant:
    generation: int


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Free:
    """Give a shard's descriptors back, in the fd store and here."""

    id: str
    generation: int
    bytes_freed: int
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Take a shard out of the fd store: it must not come back after a restart."""

    generation: int


@dataclass(frozen=True, slots=True)
class Drop:
    """End a connection whose lease was taken away, so that its engine learns of it."""

    connection: int


Effect = Free | Forget | Drop


# --- snapshot ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything an observer may know, taken at one moment."""

    shards: tuple[ShardInfo, ...]
    progress: ProgressInfo | None
    last_miss: MissInfo | None
    misses: dict[str, int]
    problem: str
    attached: int
    weight_bytes: int
    note: str


def label(model: str) -> str:
    """One spelling per model directory or name; pure, so symbolic links are not followed."""
    return posixpath.normpath(model.strip()) if model.strip() else ""
