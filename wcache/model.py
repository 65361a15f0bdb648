# SPDX-License-Identifier: Apache-2.0
"""The nouns that every layer shares: closed sets, dtypes, placement of a rank, a typed miss.

Pure values; no I/O, no torch. A device is a string: "cpu", or the UUID of a GPU ("GPU-..." or "MIG-...").
A dtype is torch's own name without the prefix ("bfloat16", "float8_e4m3fn").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wcache.errors import ConfigError

CPU = "cpu"

# Bits an element takes. float4_e2m1fn_x2 counts as torch counts it: one element is a byte that holds two values.
DTYPE_BITS: dict[str, int] = {
    "bool": 8, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "uint32": 32, "int32": 32, "uint64": 64, "int64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8,
}  # fmt: skip


class Mode(StrEnum):
    ZERO_COPY = "zero_copy"
    COPY = "copy"


class BackendName(StrEnum):
    HOST = "host"
    CUDA = "cuda"


class IdentityPolicy(StrEnum):
    """How a checkpoint is recognised: by its bytes; by name, size and mtime; or by the word of the named daemon."""

    CONTENT = "content"
    STAT = "stat"
    TRUST = "trust"


class RankState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    VERIFYING = "verifying"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ShardState(StrEnum):
    RESIDENT = "resident"
    QUARANTINED = "quarantined"


class Origin(StrEnum):
    """Who published a shard: the rank's own loader, or an engine that had started cold."""

    PRELOAD = "preload"
    ENGINE = "engine"


class Kind(StrEnum):
    """What a tensor is to its module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    NON_PERSISTENT = "non_persistent_buffer"
    ATTRIBUTE = "attribute"


class MissReason(StrEnum):
    NO_DAEMON = "no_daemon"
    EMPTY = "empty"
    LOADING = "loading"
    CONTENT = "checkpoint_content"
    LAYOUT = "layout"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    DENIED = "denied"
    DEVICE = "device"
    STRUCTURE = "structure"
    UNSUPPORTED = "unsupported"
    BUSY = "busy"
    PROTOCOL = "protocol"
    GENERATION_GONE = "generation_gone"
    DEADLINE = "deadline"
    OUT_OF_MEMORY = "out_of_memory"


class CheckpointFault(StrEnum):
    """Every way in which a checkpoint directory is refused."""

    NO_DIRECTORY = "no_directory"
    NO_WEIGHTS = "no_weights"
    NO_CONFIG = "no_config"
    BAD_CONFIG = "bad_config"
    BAD_INDEX = "bad_index"
    INDEX_ESCAPES = "index_escapes_directory"
    MISSING_FILE = "missing_file"
    MISSING_TENSOR = "missing_tensor"
    STALE_INDEX = "stale_index"
    INCOMPLETE_DOWNLOAD = "incomplete_download"
    LFS_POINTER = "lfs_pointer"
    EMPTY_FILE = "empty_file"
    NOT_A_FILE = "not_a_file"
    UNREADABLE = "unreadable"
    HEADER_TOO_SHORT = "header_too_short"
    HEADER_TOO_LARGE = "header_too_large"
    HEADER_NOT_JSON = "header_not_json"
    HEADER_INVALID = "header_invalid"
    DUPLICATE_NAME = "duplicate_name"
    DUPLICATE_TENSOR = "duplicate_tensor"
    BAD_DTYPE = "bad_dtype"
    BAD_SHAPE = "bad_shape"
    SHAPE_OVERFLOW = "shape_overflow"
    BAD_OFFSETS = "bad_offsets"
    SIZE_MISMATCH = "size_mismatch"
    OVERLAP = "overlap"
    HOLE = "hole"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    CHANGED_WHILE_READING = "changed_while_reading"
    UNKNOWN_SNAPSHOT = "unknown_snapshot"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a request and a resident shard differ; values are plain (JSON) values."""

    field: str
    asked: Any
    resident: Any

    def __str__(self) -> str:
        return f"{self.field}: asked {self.asked!r}, resident {self.resident!r}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of the group that serves one model together."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}_size is {value}; it must be at least 1")
        if self.tp * self.dp % self.ep:
            raise ConfigError(f"ep_size {self.ep} does not divide the {self.tp * self.dp} ranks of a pipeline stage")

    @property
    def world(self) -> int:
        """Ranks in the group; experts are spread over the ranks of each pipeline stage, so ep adds none."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank stands in its group: tp varies fastest, then pp, then dp."""

    sizes: Sizes
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.sizes.world:
            raise ConfigError(f"rank {self.rank} is outside the group of {self.sizes.world} ranks")

    @property
    def tp_rank(self) -> int:
        return self.rank % self.sizes.tp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.sizes.tp % self.sizes.pp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.sizes.tp * self.sizes.pp)

    @property
    def ep_rank(self) -> int:
        """Counted within a pipeline stage: each stage must hold every expert of its layers."""
        return (self.dp_rank * self.sizes.tp + self.tp_rank) % self.sizes.ep


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor of `shape`; dims are trusted to be non-negative."""
    count = 1
    for dim in shape:
        count *= dim
    return count * DTYPE_BITS[dtype] // 8
