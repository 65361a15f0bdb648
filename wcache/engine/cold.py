# SPDX-License-Identifier: Apache-2.0
"""The cold path: one rank's shard from checkpoint files into sealed segments, its identity computed on the way.

Runs in the loader child and in an engine that had a miss. Files that are not known yet are hashed from the bytes that
pass through anyway; of several ranks that load the same files, one hashes each (a claim in the digest store).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from wcache.engine.request import Request
from wcache.errors import CheckpointError
from wcache.host.fds import OwnedFd, close_all
from wcache.model import CheckpointFault
from wcache.weights.checkpoint import open_checkpoint
from wcache.weights.digests import DigestStore
from wcache.weights.identity import combine, identify, remember
from wcache.weights.load import Progress, load
from wcache.weights.manifest import SegmentSpec, StorageSpec, TensorSpec
from wcache.weights.segment import Backend
from wcache.weights.sharding import shard


@dataclass(frozen=True, slots=True)
class Cold:
    """A shard in sealed segments that nobody else knows of yet. The descriptors are the caller's."""

    content: str
    fds: list[OwnedFd]
    specs: tuple[SegmentSpec, ...]
    storages: tuple[StorageSpec, ...]
    tensors: tuple[TensorSpec, ...]
    bytes_read: int

    def close(self) -> None:
        close_all(self.fds)


def read(
    request: Request,
    store: DigestStore,
    backend: Backend,
    *,
    progress: Progress | None = None,
    keep_page_cache: bool = True,
) -> Cold:
    """Load a shard from disk. Raises CheckpointError, PlanError, OutOfMemory, SegmentError; then nothing is left."""
    checkpoint = open_checkpoint(request.survey)
    plan = shard(checkpoint, request.plan, request.placement, request.dtype)
    unknown = {*request.identity.unknown, *request.identity.claimed}
    with ExitStack() as claims:
        mine = set()
        for file in request.survey.files:
            if file.name in unknown and (claim := store.claim(file.stamp)) is not None:
                claims.enter_context(claim)
                mine.add(file.name)
        started = time.time()
        filled = load(checkpoint, plan, backend, hash_files=mine, progress=progress, keep_page_cache=keep_page_cache)
        try:
            remember(request.survey, filled.digests, store, started)
            _refuse_other_bytes(request, filled.digests)
        except BaseException:
            filled.close()
            raise
    try:
        content = _content(request, store, filled.digests)
        tally = filled.tally.bytes_read
        return Cold(content, filled.seal(), filled.specs, filled.storages, filled.tensors, tally)
    except BaseException:
        filled.close()
        raise


def _refuse_other_bytes(request: Request, digests: dict[str, str]) -> None:
    """A file that was known by its name alone, and turns out to be another, must not be published under that name."""
    wrong = [n for n, sha256 in digests.items() if request.identity.digests.get(n, sha256) != sha256]
    if wrong:
        raise CheckpointError(
            CheckpointFault.CHANGED_WHILE_READING,
            f"{request.survey.directory}: {', '.join(wrong)}: the bytes are not what the hub cache's name says",
            hint="download it again",
        )


def _content(request: Request, store: DigestStore, hashed: dict[str, str]) -> str:
    """The checkpoint's identity from what was known, hashed here, or hashed by the other ranks meanwhile."""
    claimed = request.identity.claimed
    digests = {name: d for name, d in request.identity.digests.items() if name not in claimed} | hashed
    if any(f.name not in digests for f in request.survey.files):
        others = identify(request.survey, store, request.identity.policy, by_name=False)
        _refuse_other_bytes(request, others.digests)
        digests = {**others.digests, **digests}
    return combine(request.survey, digests)
