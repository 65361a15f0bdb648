# SPDX-License-Identifier: Apache-2.0
"""The header of one safetensors file: read it, and refuse whatever could make bytes land in the wrong place.

Runs in the loader child and in the CLI; the caller owns the descriptor. Untrusted input: the length field is bounded by
the file's size, then by a cap, before anything is allocated; every other fault is a CheckpointError with its own code.
Stricter than the reference parser (safetensors 0.8) where that one is silent: a name that occurs twice, an unknown
key in an entry. The format: https://huggingface.co/docs/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from wcache.errors import CheckpointError, listed
from wcache.model import CheckpointFault

MAX_HEADER_BYTES = 512 << 20  # the reference parser stops at 100 MB, which 1.3 million tensors do not fit into
LENGTH_BYTES = 8
FIRST_READ_BYTES = 256 << 10  # one round trip takes nearly every header whole
MAX_DIMS = 64
MAX_BYTES = 2**63 - 1  # torch counts sizes and strides in signed 64 bits

# safetensors' name -> torch's name and the bits of an element. None: torch has no such dtype.
DTYPES: dict[str, tuple[str | None, int]] = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F4": ("float4_e2m1fn_x2", 4), "F6_E2M3": (None, 6), "F6_E3M2": (None, 6),
}  # fmt: skip

_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor. `dtype`: torch's name; `shape` counts elements of it; `offset` is absolute in the file (bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """`entries` in the order of their bytes; together they cover [data_offset, file size) exactly."""

    entries: tuple[HeaderEntry, ...]
    metadata: dict[str, str]
    data_offset: int


def read_header(fd: int, size: int, what: str) -> Header:
    """Read and check the header of an open file of `size` bytes; `what` names it in messages.

    Raises CheckpointError; OSError where the file system fails.
    """
    if size == 0:
        refuse(CheckpointFault.EMPTY_FILE, f"{what}: the file has 0 bytes", "download it again")
    start = _pread(fd, min(size, FIRST_READ_BYTES), 0, what)
    length = header_length(start, size, what)
    end = LENGTH_BYTES + length
    data = start[LENGTH_BYTES:end]
    if len(data) < length:
        data += _pread(fd, length - len(data), len(start), what)
    return parse_header(data, size - end, what)


def header_length(start: bytes, size: int, what: str) -> int:
    """The length field of a file that has `size` bytes and begins with `start`, bounded by both. Allocates nothing."""
    if is_lfs_pointer(start):
        message = f"{what}: a Git LFS pointer of {size} bytes, not the weights"
        refuse(CheckpointFault.LFS_POINTER, message, "fetch the data: git lfs pull")
    if size < LENGTH_BYTES:
        refuse(CheckpointFault.HEADER_TOO_SHORT, f"{what}: {size} bytes; a safetensors file has at least 10")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    there = size - LENGTH_BYTES
    if length > there:
        if length > MAX_HEADER_BYTES:
            message = f"{what}: a header of {length} bytes in a file of {size} bytes"
            hint = f"the file begins with {start[:16]!r}: is it a safetensors file at all?"
            refuse(CheckpointFault.HEADER_TOO_LARGE, message, hint)
        message = f"{what}: truncated inside the header, {length - there} of its {length} bytes are missing"
        refuse(CheckpointFault.TRUNCATED, message, "download it again")
    if length > MAX_HEADER_BYTES:
        message = f"{what}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed"
        refuse(CheckpointFault.HEADER_TOO_LARGE, message)
    if length < 2:
        refuse(CheckpointFault.HEADER_TOO_SHORT, f"{what}: a header of {length} bytes; '{{}}' already takes 2")
    return length


def parse_header(data: bytes, data_size: int, what: str) -> Header:
    """Check a header's bytes against the `data_size` bytes that follow it. Raises CheckpointError."""
    document = _decode(data, what)
    metadata = _metadata(document.pop("__metadata__", None), what)
    data_offset = LENGTH_BYTES + len(data)
    if b"\\u" in data:
        _check_names(document, what)
    entries = [_entry(name, value, data_offset, what) for name, value in document.items()]
    entries.sort(key=lambda e: (e.offset, e.nbytes))
    _check_tiling(entries, data_offset, data_size, what)
    return Header(tuple(entries), metadata, data_offset)


def refuse(fault: CheckpointFault, message: str, hint: str | None = None) -> NoReturn:
    raise CheckpointError(fault, message, hint=hint)


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that begins so is what Git keeps in the place of a large file (git-lfs pointer files, v1)."""
    return start.startswith(b"version https://")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json: raises DuplicateKey where a dict would keep the last value in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise DuplicateKey(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return found


class DuplicateKey(Exception):
    """A JSON object has this key twice."""


def _pread(fd: int, count: int, offset: int, what: str) -> bytes:
    parts, left = [], count
    while left:
        part = os.pread(fd, left, offset + count - left)
        if not part:
            refuse(CheckpointFault.CHANGED_WHILE_READING, f"{what}: the file shrank by {left} bytes while it was read")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _decode(data: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=_no_constant)
    except DuplicateKey as e:
        refuse(CheckpointFault.DUPLICATE_NAME, f"{what}: the header has {str(e)!r} twice")
    except json.JSONDecodeError as e:
        refuse(CheckpointFault.HEADER_NOT_JSON, f"{what}: the header is not JSON: {e.msg} at character {e.pos}")
    except (ValueError, RecursionError) as e:  # not UTF-8, NaN, a number of thousands of digits, nested too deeply
        refuse(CheckpointFault.HEADER_NOT_JSON, f"{what}: the header is not JSON: {_short(e)}")
    if type(document) is not dict:
        refuse(CheckpointFault.HEADER_INVALID, f"{what}: the header is a {type(document).__name__}, not an object")
    return cast(dict[str, Any], document)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _metadata(value: Any, what: str) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not dict or any(type(v) is not str for v in value.values()):
        refuse(CheckpointFault.HEADER_INVALID, f"{what}: __metadata__ must map strings to strings")
    return cast(dict[str, str], value)


def _check_names(names: Iterable[str], what: str) -> None:
    """JSON escapes can spell half a surrogate pair, which is no text and cannot be hashed, logged or sent."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            refuse(CheckpointFault.HEADER_INVALID, f"{what}: the tensor name {name!a} is not valid Unicode")


def _entry(name: str, value: Any, data_offset: int, what: str) -> HeaderEntry:
    try:
        return _checked_entry(name, value, data_offset)
    except CheckpointError as e:
        raise CheckpointError(e.fault, f"{what}: tensor {_short(name)!r}: {e}") from e


def _checked_entry(name: str, value: Any, data_offset: int) -> HeaderEntry:
    if type(value) is not dict or value.keys() != _ENTRY_KEYS:
        found = sorted(value) if type(value) is dict else type(value).__name__
        message = f"an entry has exactly dtype, shape and data_offsets; found {_short(found)}"
        refuse(CheckpointFault.HEADER_INVALID, message)
    dtype, bits = _dtype(value["dtype"])
    begin, end = _offsets(value["data_offsets"])
    shape, size = _size(dtype, bits, _shape(value["shape"]))
    if size != end - begin:
        message = f"{value['dtype']} {value['shape']} takes {size} bytes, its offsets span {end - begin}"
        refuse(CheckpointFault.SIZE_MISMATCH, message)
    return HeaderEntry(name, dtype, shape, data_offset + begin, size)


def _dtype(value: Any) -> tuple[str, int]:
    if type(value) is not str or value not in DTYPES:
        refuse(CheckpointFault.BAD_DTYPE, f"{_short(value)!r} is no safetensors dtype")
    dtype, bits = DTYPES[value]
    if dtype is None:
        refuse(CheckpointFault.BAD_DTYPE, f"torch has no dtype for {value}")
    return dtype, bits


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not list or any(type(dim) is not int or dim < 0 for dim in value):
        message = f"shape {_short(value)} is not a list of whole numbers from 0 on"
        refuse(CheckpointFault.BAD_SHAPE, message)
    if len(value) > MAX_DIMS:
        refuse(CheckpointFault.BAD_SHAPE, f"{len(value)} dimensions; at most {MAX_DIMS} are allowed")
    return tuple(value)


def _offsets(value: Any) -> tuple[int, int]:
    if (
        type(value) is not list
        or len(value) != 2
        or any(type(offset) is not int or offset < 0 for offset in value)
        or value[0] > value[1]
    ):
        refuse(CheckpointFault.BAD_OFFSETS, f"data_offsets {_short(value)} are not [begin, end]")
    if value[1] > MAX_BYTES:
        refuse(CheckpointFault.BAD_OFFSETS, f"data_offsets {_short(value)} lie beyond any file")
    return value[0], value[1]


def _size(dtype: str, bits: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The shape as torch counts it, and its bytes. A dimension of 0 counts as 1 for overflow, as in torch's strides."""
    extent = 1
    for dim in shape:
        extent *= max(dim, 1)
        if extent * bits > MAX_BYTES * 8:
            message = f"shape {_short(list(shape))} of {dtype} exceeds {MAX_BYTES} bytes"
            refuse(CheckpointFault.SHAPE_OVERFLOW, message)
    count = 0 if 0 in shape else extent
    if bits == 4:  # torch's element is a byte that holds two values
        if not shape or shape[-1] % 2:
            message = f"the last dimension of an F4 tensor must be even, its shape is {list(shape)}"
            refuse(CheckpointFault.BAD_SHAPE, message)
        shape = (*shape[:-1], shape[-1] // 2)
    return shape, count * bits // 8


def _check_tiling(entries: list[HeaderEntry], data_offset: int, data_size: int, what: str) -> None:
    """Sorted by offset, the tensors must cover the data area: no overlap, no hole, nothing missing, nothing left."""
    position = data_offset
    before = "the header"
    for entry in entries:
        if entry.offset < position:
            message = f"{what}: tensor {_short(entry.name)!r} overlaps {before} by {position - entry.offset} bytes"
            refuse(CheckpointFault.OVERLAP, message)
        if entry.offset > position:
            lost = entry.offset - position
            message = f"{what}: a hole of {lost} bytes between {before} and tensor {_short(entry.name)!r}"
            refuse(CheckpointFault.HOLE, message)
        position += entry.nbytes
        before = f"tensor {_short(entry.name)!r}"
    there, used = data_size, position - data_offset
    if used > there:
        message = f"{what}: truncated, {used - there} of {used} data bytes are missing"
        refuse(CheckpointFault.TRUNCATED, message, "download it again")
    if used < there:
        message = f"{what}: {there - used} trailing bytes after the last tensor"
        refuse(CheckpointFault.TRAILING_BYTES, message, "the file was written over a longer one, or appended to")


def _short(value: object, limit: int = 120) -> str:
    """Untrusted values in messages stay short. A list of huge numbers has no decimal form (int_max_str_digits)."""
    try:
        text = str(value)
    except ValueError:
        text = f"a {type(value).__name__} of numbers too long to print"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def describe(names: Iterable[str], limit: int = 50) -> str:
    """Names for a message, all of them up to `limit`."""
    return listed([_short(name) for name in names], limit, ", ")
