# SPDX-License-Identifier: Apache-2.0
"""Is what a live engine is about to publish really the checkpoint that it names?

Runs in engines. Whatever lies under a checkpoint's own layout must be what the loader would have made of it: the same
names, dtypes and shapes (all are compared), and the same bytes (samples are). Weights of another model, random weights,
weights that training has changed are found here and refused, not served to the next engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from wcache.engine.entries import Entry
from wcache.engine.request import Request
from wcache.engine.tensors import dtype_name, dtype_of
from wcache.errors import CheckpointError, PublishError, listed
from wcache.host.fds import OwnedFd, close_all
from wcache.model import CheckpointFault, Kind
from wcache.weights.checkpoint import Checkpoint, open_checkpoint
from wcache.weights.checkpoint_file import open_surveyed
from wcache.weights.manifest import contiguous_stride
from wcache.weights.sharding import ShardTensor, shard
from wcache.weights.slicing import Piece

SAMPLED_TENSORS = 64  # spread evenly; each read may be a round trip to a file server
SAMPLE_BYTES = 4096
_READS_AT_ONCE = 32


def claimed(entries: Sequence[Entry], request: Request) -> list[Entry]:
    """The entries that the loader would have made, under the names it would have given them.

    Non-persistent buffers are left out: no checkpoint carries them, and each engine computes its own.
    Raises PublishError naming every difference, CheckpointError.
    """
    checkpoint = open_checkpoint(request.survey)
    plan = shard(checkpoint, request.plan, request.placement, request.dtype)
    by_name = {name: entry for entry in entries for name in entry.names}
    problems = list(_unknown(entries, {n for t in plan.tensors for n in t.names}))
    found: list[tuple[ShardTensor, Entry]] = []
    for wanted in plan.tensors:
        entry = next((by_name[n] for n in wanted.names if n in by_name), None)
        if entry is None:
            problems.append(f"{wanted.names[0]}: in the checkpoint, not in what is to be published")
            continue
        problems.extend(_disagreements(wanted, entry.tensor))
        found.append((wanted, replace(entry, names=wanted.names, kind=Kind.PARAMETER)))
    if not problems:
        problems = list(_other_bytes(checkpoint, found))
    if problems:
        raise PublishError(
            f"these are not the weights of {request.survey.directory}: {listed(problems)}",
            hint="weights that are made otherwise need a layout of their own (layout=)",
        )
    return [entry for _, entry in found]


def _unknown(entries: Sequence[Entry], known: set[str]) -> Iterator[str]:
    for entry in entries:
        if entry.kind is not Kind.NON_PERSISTENT and not known.intersection(entry.names):
            yield f"{entry.names[0]}: not in the checkpoint"


def _disagreements(wanted: ShardTensor, tensor: torch.Tensor) -> Iterator[str]:
    name, shape = wanted.names[0], tuple(tensor.shape)
    if shape != wanted.shape:
        yield f"{name}: shape {shape}, {wanted.shape} by the checkpoint"
    elif not tensor.is_contiguous():
        yield f"{name}: strides {tuple(tensor.stride())}, {contiguous_stride(shape)} by the checkpoint"
    if dtype_name(tensor.dtype) != wanted.dtype:
        yield f"{name}: {dtype_name(tensor.dtype)}, {wanted.dtype} by the checkpoint"


def _other_bytes(checkpoint: Checkpoint, found: Sequence[tuple[ShardTensor, Entry]]) -> Iterator[str]:
    step = max(1, len(found) // SAMPLED_TENSORS)
    files = {p.file for wanted, _ in found[::step] for p in wanted.pieces}
    fds: dict[int, OwnedFd] = {}
    try:
        for i in files:
            fds[i] = open_surveyed(checkpoint.survey.files[i])
        with ThreadPoolExecutor(_READS_AT_ONCE, "wcache-claim") as pool:
            same = pool.map(lambda pair: _agree(pair[0], pair[1].tensor, fds), found[::step])
            for (wanted, _), good in zip(found[::step], same, strict=True):
                if not good:
                    yield f"{wanted.names[0]}: other bytes than in the checkpoint"
    finally:
        close_all(fds.values())


def _agree(wanted: ShardTensor, tensor: torch.Tensor, fds: dict[int, OwnedFd]) -> bool:
    """The first bytes of the first piece and the last bytes of the last one."""
    if not wanted.pieces or not tensor.numel():
        return True
    first, last = wanted.pieces[0], wanted.pieces[-1]
    return _same_at(first, 0, False, tensor, fds) and _same_at(last, last.rows - 1, True, tensor, fds)


def _same_at(piece: Piece, row: int, at_end: bool, tensor: torch.Tensor, fds: dict[int, OwnedFd]) -> bool:
    source_dtype = dtype_of(piece.source_dtype)
    count = min(piece.run, SAMPLE_BYTES) // source_dtype.itemsize
    skipped = piece.run // source_dtype.itemsize - count if at_end else 0
    offset = piece.offset + row * piece.pitch + skipped * source_dtype.itemsize
    data = os.pread(fds[piece.file].fileno(), count * source_dtype.itemsize, offset)
    if len(data) != count * source_dtype.itemsize:
        raise CheckpointError(CheckpointFault.TRUNCATED, f"a checkpoint file ends before byte {offset + len(data)}")
    theirs = torch.frombuffer(bytearray(data), dtype=source_dtype).to(tensor.dtype)
    start = (piece.target + row * piece.target_pitch) // tensor.element_size() + skipped
    with torch.no_grad():
        mine = tensor.view(-1)[start : start + count].to("cpu").contiguous()
    return torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
