# SPDX-License-Identifier: Apache-2.0
"""A manifest is untrusted input: every number in it is checked against the segments."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import ManifestError
from wcache.model import BackendName, Kind, Origin
from wcache.weights.fingerprint import Fingerprint, LayoutKey
from wcache.weights.manifest import (
    VERSION,
    Manifest,
    SegmentSpec,
    StorageSpec,
    TensorSpec,
    contiguous_stride,
    decode,
    encode,
    span,
)

GOOD = Manifest(
    version=VERSION,
    fingerprint=Fingerprint("c" * 64, LayoutKey(engine="e", engine_version="1", architecture="A", dtype="bfloat16")),
    rank=0,
    backend=BackendName.HOST,
    device="cpu",
    origin=Origin.PRELOAD,
    model="/m",
    created=1.0,
    segments=(SegmentSpec(1000, 4096, "sha256:0"),),
    storages=(StorageSpec(0, 0, 64), StorageSpec(0, 256, 744), StorageSpec(0, 0, 0)),
    tensors=(
        TensorSpec(("embed", "head"), Kind.PARAMETER, "bfloat16", (4, 8), (8, 1), 0),
        TensorSpec(("half",), Kind.BUFFER, "bfloat16", (4, 4), (8, 1), 0, 4),
        TensorSpec(("empty",), Kind.PARAMETER, "float32", (0, 3), (3, 1), 2),
    ),
)


def test_a_manifest_survives_the_wire() -> None:
    assert decode(encode(GOOD)) == GOOD
    assert GOOD.weight_bytes == 64 + 744
    assert GOOD.segment_bytes == 4096


def test_the_dtype_of_a_manifest_is_that_of_most_bytes() -> None:
    scale = TensorSpec(("scale",), Kind.PARAMETER, "float32", (12,), (1,), 1)
    assert msgspec.structs.replace(GOOD, tensors=(*GOOD.tensors, scale)).dtype == "bfloat16"
    more = TensorSpec(("more",), Kind.PARAMETER, "float32", (5, 5), (5, 1), 1)
    assert msgspec.structs.replace(GOOD, tensors=(*GOOD.tensors, scale, more)).dtype == "float32"
    assert msgspec.structs.replace(GOOD, tensors=()).dtype == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "version 99"),
        ({"segments": (SegmentSpec(5000, 4096, ""),)}, "5000"),
        ({"storages": (StorageSpec(0, 990, 64), *GOOD.storages[1:])}, r"\[990, 1054\)"),
        ({"storages": (StorageSpec(0, -1, 64), *GOOD.storages[1:])}, "-1"),
        ({"storages": (StorageSpec(3, 0, 64), *GOOD.storages[1:])}, "segment 3"),
        ({"tensors": (TensorSpec((), Kind.PARAMETER, "bfloat16", (1,), (1,), 0),)}, "without a name"),
        ({"tensors": (TensorSpec(("a", "a"), Kind.PARAMETER, "bfloat16", (1,), (1,), 0),)}, "named twice"),
        ({"tensors": (TensorSpec(("a",), Kind.PARAMETER, "float7", (1,), (1,), 0),)}, "float7"),
        ({"tensors": (TensorSpec(("a",), Kind.PARAMETER, "bfloat16", (33,), (1,), 0),)}, "byte 66"),
        ({"tensors": (TensorSpec(("a",), Kind.PARAMETER, "bfloat16", (2,), (1, 1), 0),)}, "strides"),
        ({"tensors": (TensorSpec(("a",), Kind.PARAMETER, "bfloat16", (2**40, 2**40), (2**40, 1), 0),)}, "ends at"),
        ({"tensors": (TensorSpec(("a",), Kind.PARAMETER, "bfloat16", (-2,), (1,), 0),)}, "negative"),
        ({"tensors": (TensorSpec(("a",), Kind.PARAMETER, "bfloat16", (1,), (1,), 7),)}, "storage 7"),
    ],
)
def test_a_manifest_that_does_not_fit_its_segments_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        decode(msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **change)))


@given(st.binary(max_size=300))
def test_random_bytes_are_a_manifest_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_flipped_byte_never_points_outside_the_segments(at: int, value: int) -> None:
    data = bytearray(encode(GOOD))
    data[at % len(data)] = value
    try:
        manifest = decode(bytes(data))
    except ManifestError:
        return
    for s in manifest.storages:
        assert s.size == 0 or 0 <= s.offset <= s.offset + s.size <= manifest.segments[s.segment].size


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple))
def test_a_contiguous_span_is_the_number_of_elements(shape: tuple[int, ...]) -> None:
    count = 1
    for n in shape:
        count *= n
    assert span(shape, contiguous_stride(shape)) == count
