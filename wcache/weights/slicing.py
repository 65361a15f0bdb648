# SPDX-License-Identifier: Apache-2.0
"""Which bytes of one checkpoint tensor a tensor-parallel rank takes, by the rule that decides about it.

Pure arithmetic over shapes; runs in the loader child. Only one dim of a tensor is ever split, so what a rank takes is
a set of evenly spaced runs of bytes. Everything that does not divide is a PlanError with the numbers, before any
memory is allocated: also a cut through an attention head or through a quantisation block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wcache.errors import PlanError
from wcache.model import DTYPE_BITS
from wcache.weights.checkpoint import TensorEntry
from wcache.weights.expression import config_value, size
from wcache.weights.plan import Part, Rule, Split

_SCALE = re.compile(r"(.*_)?scale(_inv|_2)?")  # last word of the name of a quantised weight's scale


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` evenly spaced runs of a file that make up (a part of) a tensor of a shard. Numbers are bytes.

    Source run `i` is [offset + i * pitch, + run) of the file. It goes to target + i * target_pitch of the tensor, where
    it takes `run` bytes times the ratio of the sizes of the tensor's dtype and `source_dtype`.
    """

    file: int
    offset: int
    rows: int
    run: int
    pitch: int
    target: int
    target_pitch: int
    source_dtype: str


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank takes of a tensor: `ranges` of its `dim`, one after the other. dim None: all of it."""

    dim: int | None
    ranges: tuple[tuple[int, int], ...]


EVERYTHING = Cut(None, ())


def is_scale(name: str) -> bool:
    """True for the scales of a quantised weight (weight_scale, gate_up_proj_scale_inv, k_scale, ...)."""
    return _SCALE.fullmatch(name.rpartition(".")[2]) is not None


def cut(entry: TensorEntry, rule: Rule, tp_size: int, tp_rank: int, config: Mapping[str, Any]) -> Cut:
    """What rank `tp_rank` of `tp_size` takes. Raises PlanError naming the tensor, the dim, its size and tp_size."""
    if tp_size == 1 or rule.text.split is Split.REPLICATE:
        return EVERYTHING
    dim = rule.dim
    scale = is_scale(entry.name)
    if scale and (dim >= len(entry.shape) or entry.shape[dim] == 1):
        return EVERYTHING  # one scale for the whole tensor, or one for each position of the other dim
    if dim >= len(entry.shape):
        raise PlanError(f"{entry.name} has shape {list(entry.shape)}; kind {rule.text.split} splits dim {dim}")
    axis = _Axis(entry, dim, tp_size, tp_rank, config, scale)
    if rule.text.split is Split.FUSED:
        ranges = axis.fused(rule.text.parts)
    elif rule.text.split is Split.KV:
        ranges = [axis.share(0, entry.shape[dim], axis.units(rule.text.heads or "num_key_value_heads"), kv=True)]
    else:
        heads = axis.units(rule.text.heads) if rule.text.heads is not None else None
        ranges = [axis.share(0, entry.shape[dim], heads, kv=False)]
    _check_blocks(entry, dim, ranges, tp_size, config)
    return Cut(dim, tuple(ranges))


@dataclass(frozen=True, slots=True)
class _Axis:
    """The dim of a tensor that is split, and for whom."""

    entry: TensorEntry
    dim: int
    tp_size: int
    tp_rank: int
    config: Mapping[str, Any]
    scale: bool

    @property
    def where(self) -> str:
        return f"{self.entry.name}: dim {self.dim} of size {self.entry.shape[self.dim]}"

    def units(self, text: str) -> int:
        try:
            return size(text, self.config)
        except PlanError as e:
            raise PlanError(f"{self.where}: {e}") from e

    def share(self, start: int, stop: int, units: int | None, *, kv: bool) -> tuple[int, int]:
        """This rank's part of [start, stop), which falls into `units` indivisible parts (None: single rows)."""
        length = stop - start
        what = f"it does not divide by tp_size {self.tp_size}"
        if units is not None:
            what = f"its {units} heads do not divide by tp_size {self.tp_size}"
        units = length if units is None else units
        if not self.scale and length % units:
            raise PlanError(f"{self.where}: {length} rows do not fall into {units} heads")
        if kv and units < self.tp_size:
            if self.tp_size % units:
                raise PlanError(f"{self.where}: tp_size {self.tp_size} is no multiple of its {units} heads")
            first, count = self.tp_rank // (self.tp_size // units), 1
        elif units % self.tp_size:
            raise PlanError(f"{self.where}: {what}")
        else:
            count = units // self.tp_size
            first = self.tp_rank * count
        low, high = first * length, (first + count) * length
        if low % units or high % units:  # only a scale gets here: its blocks are wider than a head
            raise PlanError(f"{self.where}: the scales of {units} heads do not divide by tp_size {self.tp_size}")
        return start + low // units, start + high // units

    def fused(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """This rank's share of every part. A scale has one row for each block of the weight's rows."""
        sizes = [self.units(part.size) for part in parts]
        length, total = self.entry.shape[self.dim], sum(sizes)
        ratio = 1
        if total != length:
            ratio = total // length if self.scale and length else 0
            if ratio == 0 or total % length or any(s % ratio for s in sizes):
                raise PlanError(f"{self.where}: its parts {sizes} sum to {total}")
        ranges, start = [], 0
        for part, rows in zip(parts, sizes, strict=True):
            stop = start + rows // ratio
            heads = self.units(part.heads) if part.heads is not None else None
            if part.kv and heads is None:
                heads = self.units("num_key_value_heads")
            ranges.append(self.share(start, stop, heads, kv=part.kv))
            start = stop
        return ranges


def _check_blocks(
    entry: TensorEntry, dim: int, ranges: Sequence[tuple[int, int]], tp_size: int, config: Mapping[str, Any]
) -> None:
    """A block-quantised weight may only be cut between its blocks: each has one scale."""
    quantization = config_value(config, "quantization_config")
    blocks = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    quantised = DTYPE_BITS[entry.dtype] == 8 and not is_scale(entry.name)
    if not (isinstance(blocks, list) and len(blocks) == len(entry.shape) and quantised):
        return
    block, length = blocks[dim], entry.shape[dim]
    for start, stop in ranges:
        if start % block or (stop % block and stop != length):
            raise PlanError(
                f"{entry.name}: dim {dim} of size {length} gives {stop - start} a rank with tp_size {tp_size},"
                f" which is no multiple of the quantisation block of {block}"
            )


def local_shape(entry: TensorEntry, what: Cut) -> tuple[int, ...]:
    if what.dim is None:
        return entry.shape
    length = sum(stop - start for start, stop in what.ranges)
    return (*entry.shape[: what.dim], length, *entry.shape[what.dim + 1 :])


def pieces(entry: TensorEntry, what: Cut, dtype: str, target: int = 0) -> list[Piece]:
    """The runs of the file that make up what a rank takes, laid out row-major from byte `target` of its tensor."""
    source_item, item = DTYPE_BITS[entry.dtype] // 8, DTYPE_BITS[dtype] // 8
    shape = local_shape(entry, what)
    if 0 in shape:
        return []
    if what.dim is None:
        size = entry.nbytes
        return [Piece(entry.file, entry.offset, 1, size, size, target, size * item // source_item, entry.dtype)]
    rows, inner = math.prod(shape[: what.dim]), math.prod(shape[what.dim + 1 :])
    found = []
    for start, stop in what.ranges:
        found.append(
            Piece(
                file=entry.file,
                offset=entry.offset + start * inner * source_item,
                rows=rows,
                run=(stop - start) * inner * source_item,
                pitch=entry.shape[what.dim] * inner * source_item,
                target=target,
                target_pitch=shape[what.dim] * inner * item,
                source_dtype=entry.dtype,
            )
        )
        target += (stop - start) * inner * item
    return found
