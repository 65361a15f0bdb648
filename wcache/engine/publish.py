# SPDX-License-Identifier: Apache-2.0
"""Publishing: become the single writer of a shard, fill segments, hand them to the rank, commit.

Runs in engines that loaded cold and in the loader child. The connection is the right to write: if this process dies
before `Committed`, nothing remains. `write` moves live tensors segment by segment (fill, digest, seal, map again,
re-point), so that peak memory is one copy and one segment; `commit` takes segments that were filled already.
Surprising: a sealed memfd can have no writable mapping, so an engine's own tensors are re-pointed to a second mapping
of the segment, the one that every other engine gets.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from wcache import __version__
from wcache.config import CONNECT_TIMEOUT_S
from wcache.engine.client import DISK, Attachment, default_access, lent, map_segments
from wcache.engine.entries import Block, Entry, blocks, check
from wcache.engine.lease import Lease
from wcache.engine.tensors import bytes_tensor, dtype_name, torch_device
from wcache.errors import ProtocolError, PublishError, WcacheError
from wcache.host.fds import MAX_FDS_PER_RECORD, OwnedFd, close_all, sealed_memfd
from wcache.model import BackendName, Mode, Origin
from wcache.protocol.connection import Connection, connect
from wcache.protocol.messages import (
    Committed,
    Done,
    Granted,
    Message,
    Progress,
    ProgressInfo,
    PublishAbort,
    PublishBegin,
    PublishCommit,
    PublishSegments,
    Query,
    Reattach,
    Resident,
)
from wcache.weights.fingerprint import Fingerprint
from wcache.weights.layout import pack
from wcache.weights.manifest import VERSION, Manifest, SegmentSpec, StorageSpec, TensorSpec, encode
from wcache.weights.segment import Backend, open_backend

log = logging.getLogger(__name__)


def begin(
    query: Query,
    socket_path: Path,
    *,
    origin: Origin = Origin.ENGINE,
    bytes_total: int = 0,
    spec: str | None = None,
    name: str | None = None,
    device: str | None = None,
    wait_s: float = 0.0,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> Publication | None:
    """Ask to be the single writer for `query`; None: it is resident already.

    Waits up to `wait_s` for another writer. Raises Busy when there is one still, Denied, Draining, Unavailable,
    ProtocolError.
    """
    name = name or f"pid {os.getpid()}"
    role = "loader" if origin is Origin.PRELOAD else "engine"
    connection = connect(socket_path, role=role, name=name, device=device, timeout_s=connect_timeout_s)
    try:
        asked = PublishBegin(query=query, origin=origin, bytes_total=bytes_total, spec=spec, wait_s=wait_s)
        reply = connection.ask(asked, Message)
        if isinstance(reply, Granted):
            return Publication(connection, query, origin, spec, name, device)
        if not isinstance(reply, Resident):
            raise ProtocolError(f"PublishBegin was answered by {type(reply).__name__}")
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


class Publication:
    """The right to publish one shard, until `commit`, `write` or `abort`. As a context manager it aborts on error."""

    def __init__(
        self,
        connection: Connection,
        query: Query,
        origin: Origin,
        spec: str | None,
        name: str,
        device: str | None,
    ) -> None:
        self.query = query
        self._connection = connection
        self._origin = origin
        self._spec = spec
        self._name = name
        self._device = device
        self._over = False

    @property
    def backend(self) -> Backend:
        """The rank's backend, on the rank's device (or ours, where the rank does not know its own yet)."""
        welcome = self._connection.welcome
        return open_backend(welcome.backend, welcome.device or self._device or "")

    def progress(self, progress: ProgressInfo) -> None:
        """Tell the rank how far we are; not answered."""
        self._connection.send(Progress(progress=progress))

    def write(
        self,
        entries: Iterable[Entry],
        *,
        repoint: bool = False,
        attributes: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        model: str | None = None,
        last: Callable[[], object] = lambda: None,
    ) -> Attachment:
        """Publish live tensors. `repoint`: parameters move onto the published memory, and their old memory is freed.

        `last`: called when all bytes are copied, before anybody sees them; what it raises ends the publication.
        Returns this process's own attachment to the result; with `repoint`, parameters hold its memory by themselves.
        Raises PublishError for tensors that cannot be shared, and what the rank answers; the publication is over then.
        """
        with self:
            todo = list(entries)
            backend = self.backend
            device = torch_device(backend.device)
            check(todo, repoint=repoint, device=device)
            found = blocks(todo)
            packing = pack([b.size for b in found], backend.granularity)
            storages = tuple(
                StorageSpec(s, o, b.size, b.device.type != device.type)
                for (s, o), b in zip(packing.places, found, strict=True)
            )
            tensors = tuple(_tensor_specs(found))  # before any of them moves
            with ExitStack() as unwind:
                fds: list[OwnedFd] = []
                unwind.callback(close_all, fds)
                specs: list[SegmentSpec] = []
                moved: list[object] = []
                for i, size in enumerate(packing.segments):
                    inside = [(b, s) for b, s in zip(found, storages, strict=True) if s.size and s.segment == i]
                    specs.append(_fill(backend, f"segment-{i}", size, inside, fds))
                    if repoint:
                        moved.append(_repoint(backend, fds[-1], size, inside))
                manifest = self._manifest(
                    backend, tuple(specs), storages, tensors, model=model, attributes=attributes, extra=extra
                )
                last()
                return self._attached(self._commit(manifest, fds), manifest, fds, moved)

    def commit(
        self,
        backend: Backend,
        fds: Sequence[OwnedFd],
        specs: tuple[SegmentSpec, ...],
        storages: tuple[StorageSpec, ...],
        tensors: tuple[TensorSpec, ...],
        *,
        content: str | None = None,
        attach: bool = True,
    ) -> Attachment | None:
        """Publish sealed segments; the descriptors stay the caller's.

        `content`: where the query could not name it. `attach` false: nothing is mapped and no lease is taken.
        """
        with self:
            manifest = self._manifest(backend, specs, storages, tensors, content=content)
            committed = self._commit(manifest, fds)
            if attach:
                return self._attached(committed, manifest, fds)
            self._connection.close()
            return None

    def _manifest(
        self,
        backend: Backend,
        specs: tuple[SegmentSpec, ...],
        storages: tuple[StorageSpec, ...],
        tensors: tuple[TensorSpec, ...],
        *,
        content: str | None = None,
        model: str | None = None,
        attributes: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Manifest:
        known = self.query.content or content
        if known is None:
            raise PublishError("the checkpoint's content is not known; nothing can be published under no name")
        if content is not None and content != known:
            raise PublishError(f"the checkpoint's content is {content}, the publication was begun for {known}")
        return Manifest(
            version=VERSION,
            fingerprint=Fingerprint(known, self.query.layout),
            rank=self._connection.welcome.rank,
            backend=backend.name,
            device=backend.device,
            origin=self._origin,
            model=model or self.query.model,
            created=time.time(),
            segments=specs,
            storages=storages,
            tensors=tensors,
            attributes=attributes or {},
            spec=self._spec,
            wcache_version=__version__,
            extra=extra or {},
        )

    def _commit(self, manifest: Manifest, fds: Sequence[OwnedFd]) -> Committed:
        for first in range(0, len(fds), MAX_FDS_PER_RECORD):
            part = list(fds[first : first + MAX_FDS_PER_RECORD])
            self._connection.ask(PublishSegments(first=first), Done, part)
        with sealed_memfd("wcache:manifest", encode(manifest)) as fd:
            return self._connection.ask(PublishCommit(), Committed, [fd])

    def _attached(
        self, committed: Committed, manifest: Manifest, fds: Sequence[OwnedFd], moved: Sequence[object] = ()
    ) -> Attachment:
        """This process's own attachment to what it published; `moved`: memory that parameters stand on already."""
        mapping = map_segments(manifest, list(fds))
        try:
            lease = self._lease(committed)
            lease.bind([*lent(mapping, manifest), *moved])
            return Attachment(manifest, mapping, lease, source=DISK)
        except BaseException:
            mapping.close()
            raise

    def _lease(self, committed: Committed) -> Lease:
        """The writer uses what it published, so it holds a lease on it like any engine."""
        again = Reattach(fingerprint=committed.fingerprint, generation=committed.generation, mode=Mode.ZERO_COPY)
        self._connection.ask(again, Done)
        return Lease(
            self._connection,
            committed.fingerprint,
            committed.generation,
            Mode.ZERO_COPY,
            self._name,
            device=self._device,
        )

    def abort(self, reason: str) -> None:
        """Give up; whoever waits for this publication learns it at once. Idempotent."""
        if self._over:
            return
        self._over = True
        try:
            self._connection.ask(PublishAbort(reason=reason), Done)
        except (WcacheError, OSError) as e:  # the connection's end says the same; a forked child's is closed
            log.debug("abort: %s", e)
        finally:
            self._connection.close()

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is not None:
            self.abort(f"{type(value).__name__}: {value}")
        self._over = True


def _fill(
    backend: Backend, name: str, size: int, inside: list[tuple[Block, StorageSpec]], fds: list[OwnedFd]
) -> SegmentSpec:
    """One segment from its blocks: filled, digested, sealed; its fd is appended to `fds`."""
    segment = backend.create(name, size)
    try:
        for block, place in inside:
            block.copy_to(bytes_tensor(segment.memory(), place.offset, place.size))
        digest = segment.digest()
        fds.append(segment.seal())
    finally:
        segment.close()
    return SegmentSpec(size, segment.aligned_size, digest)


def _repoint(backend: Backend, fd: OwnedFd, size: int, inside: list[tuple[Block, StorageSpec]]) -> object:
    """Move the parameters of these blocks onto the published memory, which is returned; their old memory is free."""
    mapping = backend.map([fd], [size], default_access(backend.name))
    memory = mapping.memory(0)
    for block, place in inside:
        base = bytes_tensor(memory, place.offset, place.size)
        block.move_parameters(base)
    mapping.close()
    if backend.name is BackendName.CUDA:
        torch.cuda.empty_cache()  # what the parameters left goes back to the device before the next segment is made
    return memory


def _tensor_specs(found: Sequence[Block]) -> Iterable[TensorSpec]:
    for storage, block in enumerate(found):
        for entry in block.entries:
            t = entry.tensor
            yield TensorSpec(
                entry.names,
                entry.kind,
                dtype_name(t.dtype),
                tuple(t.shape),
                tuple(t.stride()),
                storage,
                block.offset_of(entry),
            )
