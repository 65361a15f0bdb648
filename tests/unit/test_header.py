# SPDX-License-Identifier: Apache-2.0
"""A safetensors header is taken apart completely or refused, each fault by its own name, before memory is allocated."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import CheckpointError
from wcache.model import DTYPE_BITS, CheckpointFault, nbytes
from wcache.weights.header import DTYPES, Header, parse_header, read_header

F = CheckpointFault


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def parse(header: object, size: int = 0) -> Header:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(data, size, "f.safetensors")


def read(data: bytes, size: int | None = None) -> Header:
    with tempfile.TemporaryFile() as f:
        f.write(data)
        f.flush()
        return read_header(f.fileno(), len(data) if size is None else size, "f.safetensors")


def fault_of(call: Callable[[], object]) -> tuple[CheckpointFault, str]:
    with pytest.raises(CheckpointError) as e:
        call()
    return e.value.fault, str(e.value)


BAD_HEADERS = {
    "overlap": ({"a": entry("U8", [16], 0, 16), "b": entry("U8", [16], 8, 24)}, 24, F.OVERLAP, "by 8 bytes"),
    "same bytes twice": ({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 0, 8)}, 8, F.OVERLAP, "by 8 bytes"),
    "empty inside another": ({"a": entry("U8", [8], 0, 8), "b": entry("U8", [0], 4, 4)}, 8, F.OVERLAP, "by 4 bytes"),
    "hole": ({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 16, 24)}, 24, F.HOLE, "a hole of 8 bytes"),
    "hole at the start": ({"a": entry("U8", [8], 8, 16)}, 16, F.HOLE, "a hole of 8 bytes"),
    "truncated": ({"a": entry("U8", [8], 0, 8)}, 5, F.TRUNCATED, "3 of 8 data bytes"),
    "trailing": ({"a": entry("U8", [8], 0, 8)}, 24, F.TRAILING_BYTES, "16 trailing bytes"),
    "bytes without a tensor": ({}, 1, F.TRAILING_BYTES, "1 trailing bytes"),
    "size": ({"a": entry("F32", [4], 0, 8)}, 8, F.SIZE_MISMATCH, "takes 16 bytes, its offsets span 8"),
    "overflow": ({"a": entry("U8", [2**32, 2**32], 0, 0)}, 0, F.SHAPE_OVERFLOW, "exceeds"),
    "overflow beside 0": ({"a": entry("U8", [2**32, 2**32, 0], 0, 0)}, 0, F.SHAPE_OVERFLOW, "exceeds"),
    "overflow by bytes": ({"a": entry("F64", [2**61], 0, 0)}, 0, F.SHAPE_OVERFLOW, "exceeds"),
    "overflow in one": ({"a": entry("U8", [10**4000], 0, 0)}, 0, F.SHAPE_OVERFLOW, "characters"),
    "negative": ({"a": entry("U8", [-1, -8], 0, 8)}, 8, F.BAD_SHAPE, "[-1, -8]"),
    "true": ({"a": entry("U8", [True], 0, 1)}, 1, F.BAD_SHAPE, "True"),
    "1.0": ({"a": entry("U8", [1.0], 0, 1)}, 1, F.BAD_SHAPE, "1.0"),
    "string": ({"a": entry("U8", ["8"], 0, 8)}, 8, F.BAD_SHAPE, "'8'"),
    "null": ({"a": entry("U8", None, 0, 1)}, 1, F.BAD_SHAPE, "None"),
    "a number": ({"a": entry("U8", 8, 0, 8)}, 8, F.BAD_SHAPE, "shape 8"),
    "many": ({"a": entry("U8", [1] * 65, 0, 1)}, 1, F.BAD_SHAPE, "65 dimensions"),
    "odd F4": ({"a": entry("F4", [2, 3], 0, 3)}, 3, F.BAD_SHAPE, "must be even"),
    "scalar F4": ({"a": entry("F4", [], 0, 1)}, 1, F.BAD_SHAPE, "must be even"),
    "unknown dtype": ({"a": entry("F7_X", [8], 0, 8)}, 8, F.BAD_DTYPE, "'F7_X' is no safetensors dtype"),
    "dtype no string": ({"a": entry(["U8"], [8], 0, 8)}, 8, F.BAD_DTYPE, "no safetensors dtype"),
    "F6_E2M3": ({"a": entry("F6_E2M3", [4], 0, 3)}, 3, F.BAD_DTYPE, "torch has no dtype for F6_E2M3"),
    "F6_E3M2": ({"a": entry("F6_E3M2", [4], 0, 3)}, 3, F.BAD_DTYPE, "torch has no dtype for F6_E3M2"),
    "reversed offsets": ({"a": entry("U8", [8], 8, 0)}, 8, F.BAD_OFFSETS, "[8, 0]"),
    "negative offset": ({"a": entry("U8", [8], -8, 0)}, 8, F.BAD_OFFSETS, "[-8, 0]"),
    "one offset": ({"a": entry("U8", [8], 0)}, 8, F.BAD_OFFSETS, "[0]"),
    "three offsets": ({"a": entry("U8", [8], 0, 8, 8)}, 8, F.BAD_OFFSETS, "[0, 8, 8]"),
    "boolean offset": ({"a": entry("U8", [1], False, True)}, 1, F.BAD_OFFSETS, "True"),
    "offset of 2**64": ({"a": entry("U8", [8], 2**64, 2**64 + 8)}, 8, F.BAD_OFFSETS, "beyond any file"),
    "entry a list": ({"a": [1, 2]}, 0, F.HEADER_INVALID, "found list"),
    "entry lacks dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, 1, F.HEADER_INVALID, "data_offsets"),
    "entry has more": ({"a": {**entry("U8", [1], 0, 1), "codec": "z"}}, 1, F.HEADER_INVALID, "codec"),
    "metadata numbers": ({"__metadata__": {"a": 1}}, 0, F.HEADER_INVALID, "__metadata__"),
    "metadata list": ({"__metadata__": []}, 0, F.HEADER_INVALID, "__metadata__"),
    "header a list": (b"[]", 0, F.HEADER_INVALID, "a list"),
    "half a pair": (b'{"\\ud800": 1}', 0, F.HEADER_INVALID, "Unicode"),
    "twice": (b'{"a": 1, "a": 2}', 0, F.DUPLICATE_NAME, "'a' twice"),
    "key twice": (b'{"a": {"dtype": "U8", "dtype": "I8"}}', 0, F.DUPLICATE_NAME, "'dtype' twice"),
    "not JSON": (b"{nonsense}", 0, F.HEADER_NOT_JSON, "character 1"),
    "NUL padding": (b"{}\0\0", 0, F.HEADER_NOT_JSON, "Extra data"),
    "not UTF-8": (b'{"\xff": 1}', 0, F.HEADER_NOT_JSON, "utf-8"),
    "NaN": (b'{"a": NaN}', 0, F.HEADER_NOT_JSON, "NaN"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", 0, F.HEADER_NOT_JSON, "digits"),
    "depth": (b"[" * 100_000, 0, F.HEADER_NOT_JSON, "recursion"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_each_fault_of_a_header_has_its_own_name_and_its_numbers(case: str) -> None:
    header, size, fault, words = BAD_HEADERS[case]
    found, message = fault_of(lambda: parse(header, size))
    assert found is fault
    assert "f.safetensors" in message
    assert words in message
    assert len(message) < 400


BAD_FILES = {
    "empty": (b"", F.EMPTY_FILE, "0 bytes"),
    "7 bytes": (b"\0" * 7, F.HEADER_TOO_SHORT, "7 bytes"),
    "length 0": (struct.pack("<Q", 0), F.HEADER_TOO_SHORT, "0 bytes"),
    "length 1": (struct.pack("<Q", 1) + b"{", F.HEADER_TOO_SHORT, "1 bytes"),
    "length 2**63": (struct.pack("<Q", 2**63) + b"{}", F.HEADER_TOO_LARGE, "9223372036854775808 bytes"),
    "length 2**64-1": (struct.pack("<Q", 2**64 - 1) + b"{}", F.HEADER_TOO_LARGE, "file of 10 bytes"),
    "cut in the header": (struct.pack("<Q", 100) + b"{}", F.TRUNCATED, "98 of its 100 bytes"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", F.LFS_POINTER, "LFS"),
    "a web page": (b"<!DOCTYPE html><html>Not found</html>", F.HEADER_TOO_LARGE, "header of"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_safetensors_file_is_refused_by_what_it_is(case: str) -> None:
    data, fault, words = BAD_FILES[case]
    found, message = fault_of(lambda: read(data))
    assert found is fault
    assert words in message


def test_the_length_field_is_bounded_by_the_cap_even_if_the_file_is_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    data = struct.pack("<Q", 1000) + b"{}".ljust(1000)
    assert read(data).entries == ()
    monkeypatch.setattr("wcache.weights.header.MAX_HEADER_BYTES", 999)
    assert fault_of(lambda: read(data))[0] is F.HEADER_TOO_LARGE


@pytest.mark.parametrize("length", [99_999, 100_000, 100_001, 256 << 10, (256 << 10) + 1, 1 << 20])
def test_a_header_of_any_length_is_read_whole(length: int) -> None:
    text = json.dumps({"a": entry("U8", [3], 0, 3)}).encode().ljust(length)
    (tensor,) = read(struct.pack("<Q", length) + text + b"abc").entries
    assert tensor.offset == 8 + length


def test_a_file_that_shrinks_while_it_is_read_is_noticed() -> None:
    data = struct.pack("<Q", 1000) + b"{}".ljust(500)
    assert fault_of(lambda: read(data, size=1008))[0] is F.CHANGED_WHILE_READING


def test_tensors_come_in_the_order_of_their_bytes_with_absolute_offsets() -> None:
    header = parse({"b": entry("U8", [8], 8, 16), "a": entry("F32", [2, 1], 0, 8), "c": entry("U8", [0], 16, 16)}, 16)
    start = header.data_offset
    assert [(e.name, e.dtype, e.shape, e.offset - start, e.nbytes) for e in header.entries] == [
        ("a", "float32", (2, 1), 0, 8),
        ("b", "uint8", (8,), 8, 8),
        ("c", "uint8", (0,), 16, 0),
    ]


def test_metadata_is_kept_and_is_no_tensor() -> None:
    header = parse({"__metadata__": {"format": "pt"}, "s": entry("BF16", [], 0, 2)}, 2)
    assert header.metadata == {"format": "pt"}
    assert [e.shape for e in header.entries] == [()]


@pytest.mark.parametrize("name", [n for n, (dtype, _) in DTYPES.items() if dtype])
def test_every_dtype_is_torchs_and_takes_as_many_bytes(name: str) -> None:
    import torch

    dtype, bits = DTYPES[name]
    assert dtype is not None
    (tensor,) = parse({"a": entry(name, [4, 8], 0, 4 * bits)}, 4 * bits).entries
    assert tensor.nbytes == nbytes(tensor.dtype, tensor.shape)
    assert getattr(torch, dtype).itemsize * 8 == DTYPE_BITS[dtype]


def test_two_f4_values_are_one_element_of_torchs() -> None:
    (tensor,) = parse({"a": entry("F4", [4, 8], 0, 16)}, 16).entries
    assert (tensor.dtype, tensor.shape) == ("float4_e2m1fn_x2", (4, 4))


@given(st.binary(max_size=200))
def test_random_files_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        read(data)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["U8", "F32", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), json_values, max_size=3), st.integers(0, 64))
def test_random_headers_are_refused_or_cover_their_bytes(header: object, size: int) -> None:
    try:
        found = parse(json.dumps(header).encode(), size)
    except CheckpointError:
        return
    assert sum(e.nbytes for e in found.entries) == size


shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["U8", "BF16", "F64"]), shapes), max_size=6), st.randoms())
def test_tensors_that_tile_the_data_are_accepted_in_any_order(tensors: list[Any], random: Any) -> None:
    header, position = {}, 0
    for i, (dtype, shape) in enumerate(tensors):
        size = DTYPES[dtype][1] // 8 * math.prod(shape)
        header[f"t{i}"] = entry(dtype, shape, position, position + size)
        position += size
    shuffled = dict(random.sample(list(header.items()), len(header)))
    assert len(parse(shuffled, position).entries) == len(tensors)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.data(), st.sampled_from([-1, 1]))
def test_moving_one_tensor_by_a_byte_is_always_an_overlap_or_a_hole(sizes: list[int], data: Any, step: int) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    moved = data.draw(st.integers(1, len(sizes) - 1))
    header = {}
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        begin = start + (step if i == moved else 0)
        header[f"t{i}"] = entry("U8", [size], begin, begin + size)
    fault, _ = fault_of(lambda: parse(header, sum(sizes)))
    assert fault in {F.OVERLAP, F.HOLE}


def test_a_hundred_thousand_tensors_are_checked_within_seconds() -> None:
    header = {f"model.layers.{i}.weight": entry("U8", [1], i, i + 1) for i in range(100_000)}
    assert len(parse(header, 100_000).entries) == 100_000


def test_a_directory_is_an_error_of_the_file_system() -> None:
    fd = os.open("/", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Is a directory"):
            read_header(fd, 100, "f.safetensors")
    finally:
        os.close(fd)
