# SPDX-License-Identifier: Apache-2.0
"""The manifest of a shard: where every tensor lies, and what the shard is.

Written by whoever fills the segments, kept by the daemon as a sealed memfd (the commit record), read by engines.
A manifest from a socket or from the fd store is untrusted input: `decode` checks everything against the segments.
Names that share one tensor (tied weights) are names of one entry; tensors that share memory share a storage.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from wcache.errors import ManifestError
from wcache.model import DTYPE_BITS, BackendName, Kind, Origin, nbytes
from wcache.weights.fingerprint import Fingerprint

VERSION = 1
ALIGNMENT = 256  # bytes; every storage starts on it
MAX_MANIFEST_BYTES = 256 << 20


class SegmentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`size`: bytes in use. `aligned_size`: bytes granted. `digest`: "algorithm:hex" over the first `size` bytes."""

    size: int
    aligned_size: int
    digest: str


class StorageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A run of bytes that becomes one torch storage. `size` 0 is allowed and takes no memory.

    `host`: in a shard on a GPU, what the engine keeps in host memory all the same, and copies there.
    """

    segment: int
    offset: int
    size: int
    host: bool = False


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor. `names`: the first is canonical, the others are tied to it.

    `shape`, `stride` and `storage_offset` count elements of `dtype` (torch's name), as torch does.
    """

    names: tuple[str, ...]
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int
    storage_offset: int = 0

    @property
    def name(self) -> str:
        return self.names[0]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layout, tensors and fingerprint of one shard.

    `attributes`: plain values that decide the result and are no tensors, by dotted name.
    `spec`: digest of the preload configuration that made it, None for an engine's publication.
    `extra`: what an engine integration needs to rebuild its own state (plain values).
    """

    version: int
    fingerprint: Fingerprint
    rank: int
    backend: BackendName
    device: str
    origin: Origin
    model: str
    created: float  # seconds since the epoch
    segments: tuple[SegmentSpec, ...]
    storages: tuple[StorageSpec, ...]
    tensors: tuple[TensorSpec, ...]
    attributes: dict[str, Any] = {}
    spec: str | None = None
    wcache_version: str = ""
    extra: dict[str, Any] = {}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all storages, each counted once."""
        return sum(s.size for s in self.storages)

    @property
    def segment_bytes(self) -> int:
        """Bytes of memory the segments take."""
        return sum(s.aligned_size for s in self.segments)

    @property
    def dtype(self) -> str:
        """The dtype of most of the tensors' bytes; empty for a shard without tensors."""
        sizes = Counter[str]()
        for tensor in self.tensors:
            sizes[tensor.dtype] += nbytes(tensor.dtype, tensor.shape)
        return max(sizes, key=lambda name: sizes[name], default="")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    check(manifest)
    return _encoder.encode(manifest)


def decode(data: bytes | memoryview) -> Manifest:
    """Parse and check untrusted bytes. Raises ManifestError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest of {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are allowed")
    try:
        manifest = _decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise ManifestError(f"not a manifest: {e}") from e
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Every number points inside its segment, every name is there once. Raises ManifestError."""
    if manifest.version != VERSION:
        raise ManifestError(f"manifest version {manifest.version}; this wcache reads version {VERSION}")
    for i, segment in enumerate(manifest.segments):
        if not 0 <= segment.size <= segment.aligned_size:
            raise ManifestError(f"segment {i}: size {segment.size} of {segment.aligned_size} bytes")
    for i, storage in enumerate(manifest.storages):
        _check_storage(manifest, i, storage)
    seen: set[str] = set()
    for tensor in manifest.tensors:
        _check_tensor(manifest, tensor)
        for name in tensor.names:
            if name in seen:
                raise ManifestError(f"tensor {name} is named twice")
            seen.add(name)


def _check_storage(manifest: Manifest, i: int, storage: StorageSpec) -> None:
    if storage.size == 0:
        return
    if not 0 <= storage.segment < len(manifest.segments):
        raise ManifestError(f"storage {i} lies in segment {storage.segment}; there are {len(manifest.segments)}")
    size = manifest.segments[storage.segment].size
    if storage.size < 0 or storage.offset < 0 or storage.offset + storage.size > size:
        raise ManifestError(
            f"storage {i} spans [{storage.offset}, {storage.offset + storage.size}) of the {size} bytes"
            f" of segment {storage.segment}"
        )


def _check_tensor(manifest: Manifest, tensor: TensorSpec) -> None:
    if not tensor.names:
        raise ManifestError("a tensor without a name")
    if tensor.dtype not in DTYPE_BITS:
        raise ManifestError(f"tensor {tensor.name}: unknown dtype {tensor.dtype!r}")
    if len(tensor.shape) != len(tensor.stride):
        raise ManifestError(f"tensor {tensor.name}: {len(tensor.shape)} dims and {len(tensor.stride)} strides")
    if min(*tensor.shape, *tensor.stride, tensor.storage_offset, 0) < 0:
        raise ManifestError(f"tensor {tensor.name}: a negative dim, stride or offset")
    if not 0 <= tensor.storage < len(manifest.storages):
        raise ManifestError(f"tensor {tensor.name} has storage {tensor.storage} of {len(manifest.storages)}")
    end = (tensor.storage_offset + span(tensor.shape, tensor.stride)) * DTYPE_BITS[tensor.dtype] // 8
    size = manifest.storages[tensor.storage].size
    if 0 not in tensor.shape and end > size:
        raise ManifestError(f"tensor {tensor.name} ends at byte {end} of a storage of {size} bytes")


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to just past the last that a strided tensor touches; 0 if it has none."""
    reach = 1
    for n, s in zip(shape, stride, strict=True):
        if n == 0:
            return 0
        reach += (n - 1) * s
    return reach


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them."""
    stride: list[int] = []
    step = 1
    for dim in reversed(shape):
        stride.append(step)
        step *= max(dim, 1)
    return tuple(reversed(stride))
