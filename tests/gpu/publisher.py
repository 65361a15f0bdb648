# SPDX-License-Identifier: Apache-2.0
"""A synthetic shard on a GPU, published through the real protocol: what an engine that started cold does, without one.

Tensor `i` is full of one byte that tells it from its neighbours, so a reader can check any of them without a copy.
Used by the GPU tests and by scripts/bench/gpu.py; needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from wcache.host.fds import OwnedFd, close_all, sealed_memfd
from wcache.model import BackendName, IdentityPolicy, Kind, Origin
from wcache.protocol.connection import Connection, connect
from wcache.protocol.messages import Committed, Done, Granted, PublishBegin, PublishCommit, PublishSegments, Query
from wcache.weights import manifest as manifests
from wcache.weights.fingerprint import Fingerprint, LayoutKey, digest
from wcache.weights.layout import pack
from wcache.weights.manifest import Manifest, SegmentSpec, StorageSpec, TensorSpec
from wcache.weights.segment_cuda import CudaBackend, CudaSegment


def query(name: str) -> Query:
    layout = LayoutKey(engine="synthetic", engine_version="1", architecture="Bytes", dtype="bfloat16")
    return Query(layout=layout, model=name, content=digest(name), policy=IdentityPolicy.CONTENT)


def filling(i: int) -> int:
    """The byte that tensor `i` is full of."""
    return i % 251 + 1


def equal_sizes(total: int, count: int) -> list[int]:
    """`count` tensors of `total` bytes together, each a whole number of 2 MiB (of KiB where it is smaller)."""
    each = total // count
    unit = 2 << 20 if each >= 2 << 20 else 1024
    return [each // unit * unit] * count


def fill(backend: CudaBackend, sizes: Sequence[int]) -> tuple[list[CudaSegment], list[StorageSpec]]:
    """Allocate and fill; the segments are the caller's."""
    packing = pack(sizes, backend.granularity)
    segments: list[CudaSegment] = []
    try:
        for i, size in enumerate(packing.segments):
            segments.append(backend.create(f"segment-{i}", size))
        storages = [StorageSpec(s, offset, size) for (s, offset), size in zip(packing.places, sizes, strict=True)]
        for i, storage in enumerate(storages):
            address = segments[storage.segment].memory().address + storage.offset
            backend.gpu.fill(address, filling(i), storage.size, 0, f"tensor {i}")
        backend.gpu.synchronize("the tensors")
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    return segments, storages


def publish(
    socket: Path,
    device: str,
    name: str,
    sizes: Sequence[int],
    *,
    rank: int = 0,
    before_commit: Callable[[], None] = lambda: None,
) -> Committed:
    """Fill a shard of bfloat16 tensors of these sizes (bytes, even) and commit it to the rank's daemon."""
    backend = CudaBackend(device)
    with connect(socket, role="engine", name="publisher", device=device) as connection:
        segments, storages = fill(backend, sizes)
        try:
            specs = tuple(SegmentSpec(s.size, s.aligned_size, s.digest()) for s in segments)
            fds = [segment.seal() for segment in segments]
        finally:
            for segment in segments:
                segment.close()
        tensors = tuple(
            TensorSpec((f"layer.{i}.weight",), Kind.PARAMETER, "bfloat16", (size // 2,), (1,), i)
            for i, size in enumerate(sizes)
        )
        asked = query(name)
        manifest = Manifest(
            version=manifests.VERSION,
            fingerprint=Fingerprint(asked.content or "", asked.layout),
            rank=rank,
            backend=BackendName.CUDA,
            device=device,
            origin=Origin.ENGINE,
            model=name,
            created=time.time(),
            segments=specs,
            storages=tuple(storages),
            tensors=tensors,
        )
        return _commit(connection, asked, manifest, fds, before_commit)


def _commit(
    connection: Connection, asked: Query, manifest: Manifest, fds: list[OwnedFd], before_commit: Callable[[], None]
) -> Committed:
    try:
        begin = PublishBegin(query=asked, origin=manifest.origin, bytes_total=manifest.segment_bytes)
        connection.ask(begin, Granted)
        for first in range(0, len(fds), 128):
            connection.ask(PublishSegments(first=first), Done, fds[first : first + 128])
        before_commit()
        with sealed_memfd("manifest", manifests.encode(manifest)) as memfd:
            return connection.ask(PublishCommit(), Committed, [memfd])
    finally:
        close_all(fds)
