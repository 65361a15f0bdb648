# SPDX-License-Identifier: Apache-2.0
"""Live tensors as what gets published: entries (a tensor and its names) and blocks (memory that entries share).

Runs in engines. Tensors whose bytes overlap lie in one block, so that slices and views of one another stay so; tensors
that merely come from one allocation do not. A block is as long as what its tensors touch, not as their storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from wcache.engine.tensors import dtype_name
from wcache.errors import PublishError
from wcache.model import CPU, DTYPE_BITS, Kind
from wcache.weights.manifest import span

_BLOCK_ALIGNMENT = 16  # bytes; the widest element (complex128), so that offsets inside a block stay whole elements


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor object and every name it goes by; the first is canonical."""

    names: tuple[str, ...]
    kind: Kind
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes [start, start + size) of one torch storage, and the entries inside. `size` 0: nothing to store."""

    entries: tuple[Entry, ...]
    start: int
    size: int

    @property
    def device(self) -> torch.device:
        return self.entries[0].tensor.device

    def offset_of(self, entry: Entry) -> int:
        """An entry's storage offset within the block, in its elements."""
        if self.size == 0:
            return 0
        itemsize = entry.tensor.element_size()
        return int(entry.tensor.storage_offset()) - self.start // itemsize

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the block's bytes to a uint8 tensor of `size`."""
        source = self.entries[0].tensor
        with torch.no_grad():
            raw = torch.empty(0, dtype=torch.uint8, device=source.device)
            raw.set_(source.untyped_storage(), self.start, (self.size,), (1,))
            target.copy_(raw)

    def move_parameters(self, base: torch.Tensor) -> None:
        """Let the parameters of this block stand on `base` (uint8, `size` long), and what shares memory with them.

        The memory they had is let go.
        """
        if not any(entry.kind is Kind.PARAMETER for entry in self.entries):
            return
        for entry in self.entries:
            old = entry.tensor
            new = torch.empty(0, dtype=old.dtype, device=base.device)
            new.set_(base.untyped_storage(), self.offset_of(entry), old.size(), old.stride())
            old.data = new


def check(entries: Sequence[Entry], *, repoint: bool, device: torch.device | None = None) -> None:
    """Raises PublishError naming the first tensor that cannot be shared, and why. `device`: the rank's, once known."""
    seen: set[str] = set()
    for entry in entries:
        why = _objection(entry, repoint) or (_elsewhere(entry, device) if device is not None else None)
        if why is not None:
            raise PublishError(f"tensor {entry.names[0]} cannot be published: {why}")
        for name in entry.names:
            if name in seen:
                raise PublishError(f"two tensors are named {name}")
            seen.add(name)


def _objection(entry: Entry, repoint: bool) -> str | None:
    t = entry.tensor
    if t.is_meta:
        return "it is on the meta device: there are no bytes to publish"
    if t.layout is not torch.strided or t.is_quantized or t.is_nested:
        return f"its layout is {t.layout}, not strided"
    if dtype_name(t.dtype) not in DTYPE_BITS:
        return f"dtype {t.dtype} is not supported"
    if t.is_conj() or t.is_neg():
        return "it is a lazy view (conjugate or negative); resolve it first"
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not isinstance(t, nn.Parameter):
        return f"it is a {type(t).__name__}, which keeps state of its own"
    if not t.is_leaf:
        return "it is part of an autograd graph"
    if repoint and t.requires_grad:
        return "it requires grad: a tensor that is trained cannot be shared"
    return None


def _elsewhere(entry: Entry, device: torch.device) -> str | None:
    """A GPU's engine keeps some small tensors on the host; its weights are where the rank's memory is."""
    here = entry.tensor.device
    if here == device or (here.type == CPU and entry.kind is not Kind.PARAMETER):
        return None
    return f"it is on {here}, the rank's memory on {device}"


def blocks(entries: Iterable[Entry]) -> list[Block]:
    """Entries by the memory they share, in the order in which they came."""
    by_storage: dict[int, list[tuple[int, int, int, Entry]]] = {}
    empty: list[tuple[int, Block]] = []
    for order, entry in enumerate(entries):
        t = entry.tensor
        length = span(tuple(t.shape), tuple(t.stride())) * t.element_size()
        if length == 0:
            empty.append((order, Block((entry,), 0, 0)))
            continue
        start = int(t.storage_offset()) * t.element_size()
        by_storage.setdefault(t.untyped_storage().data_ptr(), []).append((start, start + length, order, entry))
    found = empty
    for parts in by_storage.values():
        found.extend(_overlapping(sorted(parts, key=lambda p: p[:3])))
    return [block for _, block in sorted(found, key=lambda pair: pair[0])]


def _overlapping(parts: list[tuple[int, int, int, Entry]]) -> Iterable[tuple[int, Block]]:
    """Connected runs of byte ranges, each with the order of its earliest entry."""
    run: list[tuple[int, int, int, Entry]] = []
    end = -1
    for part in parts:
        if run and part[0] >= end:
            yield _block(run, end)
            run, end = [], -1
        run.append(part)
        end = max(end, part[1])
    yield _block(run, end)


def _block(run: list[tuple[int, int, int, Entry]], end: int) -> tuple[int, Block]:
    start = run[0][0] // _BLOCK_ALIGNMENT * _BLOCK_ALIGNMENT
    inside = sorted(run, key=lambda p: p[2])
    return inside[0][2], Block(tuple(p[3] for p in inside), start, end - start)
