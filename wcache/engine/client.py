# SPDX-License-Identifier: Apache-2.0
"""Attaching one shard: ask a rank, map what it lends, hold the lease.

Runs in engines; every integration (plain PyTorch, Transformers, vLLM) attaches here. An `Attachment` owns mapping and
lease; tensors made from it keep the memory mapped on their own, and the lease ends with the last of them.
Surprising: on the host an attachment is writable, because pages are private to the engine (a stray write is nobody
else's problem); on a GPU it is read-only, because there are no private pages there.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wcache.config import CONNECT_TIMEOUT_S
from wcache.engine import tensors as wrapping
from wcache.engine.lease import Lease
from wcache.engine.timing import TOTAL, Stopwatch
from wcache.errors import (
    BackendError,
    Busy,
    ConnectionClosed,
    DeadlineExceeded,
    Denied,
    DeviceMismatch,
    Draining,
    Miss,
    OutOfMemory,
    ProtocolError,
    StructureError,
    Unavailable,
    WcacheError,
)
from wcache.host.fds import OwnedFd, close_all, is_sealed
from wcache.model import BackendName, MissReason, Mode
from wcache.protocol.connection import connect
from wcache.protocol.messages import Attach, Hit, Query, Released
from wcache.weights.fingerprint import layout_id
from wcache.weights.manifest import Manifest, decode
from wcache.weights.segment import Access, Mapping, open_backend

log = logging.getLogger(__name__)

CACHE, DISK = "cache", "disk"

_REASONS: tuple[tuple[type[WcacheError], MissReason], ...] = (
    (Unavailable, MissReason.NO_DAEMON),
    (ConnectionClosed, MissReason.NO_DAEMON),
    (Denied, MissReason.DENIED),
    (DeviceMismatch, MissReason.DEVICE),
    (Draining, MissReason.DRAINING),
    (Busy, MissReason.BUSY),
    (DeadlineExceeded, MissReason.DEADLINE),
    (OutOfMemory, MissReason.OUT_OF_MEMORY),
    (StructureError, MissReason.STRUCTURE),
    (BackendError, MissReason.UNSUPPORTED),  # behind DeviceMismatch, which is one
)


@dataclass(slots=True)
class Attachment:
    """A shard in this process.

    `source`: "cache" (mapped from a rank) or "disk" (loaded here after a miss; `miss` says why). `lease` is None when
    no daemon knows of this attachment. `timing`: seconds by phase, "total" is their sum.
    """

    manifest: Manifest
    mapping: Mapping
    lease: Lease | None
    mode: Mode = Mode.ZERO_COPY
    source: str = CACHE
    miss: Miss | None = None
    timing: dict[str, float] = field(default_factory=dict)
    _tensors: dict[str, torch.Tensor] | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every name to its tensor: own storage, published shape, strides and dtype; tied names share one object.

        zero_copy: over the mapping. copy: private memory, cloned on first use.
        """
        if self._tensors is None:
            make = wrapping.wrap if self.mode is Mode.ZERO_COPY else wrapping.copy
            self._tensors = make(self.manifest, self.mapping)
        return self._tensors

    def adopt(self, tensors: dict[str, torch.Tensor]) -> None:
        """These are the tensors from now on."""
        self._tensors = tensors

    def add_time(self, watch: Stopwatch) -> None:
        """Add phases that came later."""
        for phase, seconds in watch.phases.items():
            self.timing[phase] = self.timing.get(phase, 0.0) + seconds
        self.timing[TOTAL] = sum(v for k, v in self.timing.items() if k != TOTAL)

    def release(self, *, evict: bool) -> Released | None:
        """End the lease and say what became of the shard; tensors in private memory stay."""
        if self.lease is None:
            return None
        released = self.lease.release(evict=evict)
        self.lease = None
        self.mapping.close()
        return released

    def close(self) -> None:
        """Give up mapping and lease. Tensors that are still in use keep their memory; the rank no longer counts them.

        Idempotent.
        """
        self._tensors = None
        if self.lease is not None:
            self.lease.end()
            self.lease = None
        self.mapping.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def attach_shard(
    query: Query,
    socket_path: Path,
    *,
    mode: Mode = Mode.ZERO_COPY,
    wait_s: float = 0.0,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    name: str | None = None,
    device: str | None = None,
    access: Access | None = None,
    watch: Stopwatch | None = None,
) -> Attachment:
    """Attach the shard that `query` names. `wait_s`: how long to wait for a publication in progress.

    `device`: where this engine computes ("cpu" or a GPU's UUID); another than the shard's is a miss. `access`: see
    Access; by default private pages on the host, read-only on a GPU.
    Raises Miss, Unavailable, Denied, ProtocolError, ManifestError, SegmentError, BackendError; nothing leaks.
    """
    watch = watch or Stopwatch()
    name = name or f"pid {os.getpid()}"
    with ExitStack() as unwind:
        connection = connect(socket_path, role="engine", name=name, device=device, timeout_s=connect_timeout_s)
        unwind.callback(connection.close)
        hit, manifest_fd, fds = connection.attach(Attach(query=query, mode=mode, wait_s=wait_s))
        watch.lap("connect")
        try:
            manifest = _read_manifest(manifest_fd, hit, query)
            watch.lap("verify")
            mapping = map_segments(manifest, fds, access)
        finally:
            close_all([manifest_fd, *fds])
        lease = Lease(connection, hit.fingerprint, hit.generation, mode, name, device=device)
        lease.bind(lent(mapping, manifest))
        unwind.pop_all()
    watch.lap("map")
    return Attachment(manifest, mapping, lease, mode, timing=watch.timing())


def lent(mapping: Mapping, manifest: Manifest) -> list[object]:
    """What a lease lasts as long as: the memory, or the mapping itself where there is no memory."""
    return [mapping.memory(i) for i in range(len(manifest.segments))] or [mapping]


def map_segments(manifest: Manifest, fds: list[OwnedFd], access: Access | None = None) -> Mapping:
    """Map a manifest's segments here; the descriptors stay the caller's."""
    backend = open_backend(manifest.backend, manifest.device)
    return backend.map(fds, [s.size for s in manifest.segments], access or default_access(manifest.backend))


def default_access(backend: BackendName) -> Access:
    """What an engine gets unless it asks for something else."""
    return Access.READ_WRITE if backend is BackendName.HOST else Access.READ


def _read_manifest(fd: OwnedFd, hit: Hit, query: Query) -> Manifest:
    """The manifest beside a hit; it must be what was asked for, whatever the daemon believes."""
    if not is_sealed(fd):
        raise ProtocolError("the manifest is not sealed")
    size = os.fstat(fd.fileno()).st_size
    manifest = decode(os.pread(fd.fileno(), size, 0))
    if manifest.fingerprint.id != hit.fingerprint or len(manifest.segments) != hit.segments:
        raise ProtocolError("the manifest is not the one of the shard that was announced")
    if query.content is not None and manifest.fingerprint.content != query.content:
        raise ProtocolError(f"asked for content {query.content}, got {manifest.fingerprint.content}")
    if layout_id(manifest.fingerprint.layout) != layout_id(query.layout):
        raise ProtocolError("the shard's layout is not the one that was asked for")
    return manifest


def as_miss(error: WcacheError | OSError) -> Miss:
    """Any failure of the cache as the typed miss that an engine reports."""
    if isinstance(error, Miss):
        return error
    if isinstance(error, OSError):  # no descriptor left, no address space left: this process, not the protocol
        return Miss(MissReason.UNSUPPORTED, f"{type(error).__name__}: {error}")
    reason = next((r for kind, r in _REASONS if isinstance(error, kind)), MissReason.PROTOCOL)
    return Miss(reason, error.message, hint=error.hint)
