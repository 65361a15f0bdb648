# SPDX-License-Identifier: Apache-2.0
"""The daemon's side of a publication: segments arrive, a manifest commits them, or nothing remains.

Runs in the writer's session thread; owns the descriptors until the store takes them at commit. What a writer says is
checked against what it sent and against what it was granted; the bytes are proven by their digests later.
"""

from __future__ import annotations

import logging

from wcache.daemon.facts import Publication, Shard, shard_of
from wcache.daemon.rank import Rank
from wcache.daemon.status import size
from wcache.daemon.store import check_sealed, check_shard, read_manifest
from wcache.errors import DeviceMismatch, ManifestError, PublishError
from wcache.host.fds import OwnedFd, close_all
from wcache.log import PUBLISHED, fields
from wcache.model import BackendName
from wcache.weights.fingerprint import layout_id
from wcache.weights.manifest import Manifest

log = logging.getLogger(__name__)

MAX_SEGMENTS = 8192


class Writer:
    """Descriptors of one publication in progress."""

    def __init__(self, rank: Rank, connection: int) -> None:
        self._rank = rank
        self._connection = connection
        self._segments: list[OwnedFd] = []

    def add(self, first: int, fds: list[OwnedFd]) -> None:
        """Take over the next segments. Raises PublishError."""
        have = len(self._segments)
        self._segments.extend(fds)
        if not fds or first != have:
            raise PublishError(f"segments from {first} with {len(fds)} descriptors; {have} have come before")
        if len(self._segments) > MAX_SEGMENTS:
            raise PublishError(f"more than {MAX_SEGMENTS} segments")
        if self._rank.who.config.backend is BackendName.HOST:
            for i, fd in enumerate(fds, have):
                check_sealed(fd, i)

    def commit(self, fds: list[OwnedFd]) -> Shard:
        """Make the shard resident; takes over the descriptor. Raises PublishError, ManifestError, DeviceMismatch."""
        rank = self._rank
        if len(fds) != 1:
            close_all(fds)
            raise PublishError(f"a commit comes with one manifest, not with {len(fds)} descriptors")
        with fds[0] as fd:
            manifest = read_manifest(fd)
            with rank.state() as state:
                publication, device = state.publication(self._connection), state.device
            self._check(manifest, publication, device)
            shard = shard_of(manifest, publication.generation)
            segments, self._segments = self._segments, []
            rank.store.add(shard.name, shard.generation, OwnedFd(fd.take()), segments)
        try:
            with rank.state() as state:
                state.commit(self._connection, shard)
        except BaseException:
            rank.store.free(shard.generation)
            raise
        log.info(
            "rank %d exported %d params", rank.who.rank, shard.tensors,
            extra=fields(
                MESSAGE_ID=PUBLISHED, WCACHE_RANK=rank.who.rank, WCACHE_FINGERPRINT=shard.id,
                WCACHE_GENERATION=shard.generation, WCACHE_BYTES=shard.segment_bytes,
                WCACHE_WRITER=publication.client.name,
            ),
        )  # fmt: skip
        log.info(
            "rank %d holds shard %s generation %d of %s: %s in %d segments",
            rank.who.rank, shard.name, shard.generation, shard.model, size(shard.segment_bytes), shard.segments,
        )  # fmt: skip
        return shard

    def _check(self, manifest: Manifest, publication: Publication, device: str | None) -> None:
        check_shard(manifest, self._segments, self._rank.who.rank, self._rank.who.config.backend)
        query, fingerprint = publication.query, manifest.fingerprint
        if layout_id(fingerprint.layout) != layout_id(query.layout):
            raise ManifestError("the manifest's layout is not the one that was begun")
        if query.content is not None and fingerprint.content != query.content:
            raise ManifestError("the manifest's content is not the one that was begun")
        if not _is_digest(fingerprint.content):
            raise ManifestError("the manifest's content is no SHA-256")
        if manifest.origin is not publication.origin or manifest.spec != publication.spec:
            raise ManifestError("the manifest's origin or spec is not the one that was begun")
        if device is not None and manifest.device != device:
            raise DeviceMismatch(f"the segments are on device {manifest.device}, the rank is on {device}")

    def close(self) -> None:
        close_all(self._segments)
        self._segments = []


def _is_digest(content: str) -> bool:
    return len(content) == 64 and not set(content) - set("0123456789abcdef")
