# SPDX-License-Identifier: Apache-2.0
"""The descriptors of every shard a rank holds, here and in systemd's fd store, by generation.

Runs in the daemon; owns every descriptor it was given until `free`. Names in the fd store are
`seg.<fp12>.<generation>.<index>` and `manifest.<fp12>.<generation>`; the manifest goes last and is the commit record,
so a set without it, or with a segment missing, is what a crash left behind and is dropped on restore.
Without systemd everything works but surviving the daemon.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from wcache.errors import ManifestError, NoSuchShard, WcacheError
from wcache.host.fds import OwnedFd, close_all, is_sealed
from wcache.host.systemd import Inherited, Notifier
from wcache.model import BackendName
from wcache.weights import manifest as manifests
from wcache.weights.manifest import Manifest

log = logging.getLogger(__name__)

DEVICE_NAME = "device"
_NAME = re.compile(r"(?P<kind>seg|manifest)\.(?P<fp>[0-9a-f]{12})\.(?P<generation>\d{1,19})(?:\.(?P<index>\d{1,6}))?")


@dataclass(slots=True)
class Holding:
    """One shard's descriptors. Lent to senders: closed when it is freed *and* nobody borrows it."""

    name: str
    generation: int
    manifest: OwnedFd
    segments: list[OwnedFd]
    stored: bool = False
    borrowers: int = 0
    freed: bool = False

    def fd_names(self) -> list[str]:
        """In the order in which they go to the fd store."""
        return [_segment_name(self.name, self.generation, i) for i in range(len(self.segments))] + [
            _manifest_name(self.name, self.generation)
        ]


@dataclass(slots=True)
class _Remains:
    """What the fd store kept under one fingerprint and generation."""

    manifests: list[Inherited] = field(default_factory=list)
    segments: dict[int, list[Inherited]] = field(default_factory=dict)

    def all(self) -> list[Inherited]:
        return self.manifests + [one for same in self.segments.values() for one in same]


class Store:
    """Thread-safe. The lock is never held while systemd or a client is waited for."""

    def __init__(self, rank: int, backend: BackendName, notifier: Notifier) -> None:
        self._rank = rank
        self._backend = backend
        self._notifier = notifier
        self._lock = threading.Lock()
        self._holdings: dict[int, Holding] = {}
        self._device: OwnedFd | None = None

    def add(self, name: str, generation: int, manifest: OwnedFd, segments: list[OwnedFd]) -> None:
        """Take over a shard's descriptors and keep them in the fd store; on return systemd has them."""
        holding = Holding(name, generation, manifest, segments)
        with self._lock:
            self._holdings[generation] = holding
            kept = sum(len(h.segments) + 1 for h in self._holdings.values())
        limit = self._notifier.store_limit
        if not self._notifier.stores or (limit is not None and kept + 1 > limit):
            if self._notifier.active:
                log.warning(
                    "rank %d: the fd store takes %s descriptors, %d are needed: shard %s will not survive a restart"
                    " (FileDescriptorStoreMax=)", self._rank, limit, kept + 1, name,
                )  # fmt: skip
            return
        holding.stored = True
        taken = [self._notifier.store(n, fd) for n, fd in zip(holding.fd_names(), [*segments, manifest], strict=True)]
        if not (all(taken) and self._notifier.barrier()):
            log.warning("rank %d: systemd may not have kept shard %s: a restart would load it anew", self._rank, name)

    @contextmanager
    def lend(self, generation: int) -> Iterator[Holding]:
        """Use a shard's descriptors; they stay open meanwhile. Raises NoSuchShard if it was freed."""
        with self._lock:
            holding = self._holdings.get(generation)
            if holding is None:
                raise NoSuchShard(f"generation {generation} was freed")
            holding.borrowers += 1
        try:
            yield holding
        finally:
            with self._lock:
                holding.borrowers -= 1
                last = holding.freed and holding.borrowers == 0
            if last:
                self._close(holding)

    def read_manifest(self, generation: int) -> Manifest:
        with self.lend(generation) as holding:
            return read_manifest(holding.manifest)

    def forget(self, generation: int) -> None:
        """Take a shard out of the fd store; it is kept here."""
        with self._lock:
            holding = self._holdings.get(generation)
            stored = holding is not None and holding.stored
            if holding is not None:
                holding.stored = False
        if holding is not None and stored:
            self._remove(reversed(holding.fd_names()))

    def free(self, generation: int) -> None:
        """Give a shard's descriptors back: out of the fd store first, then closed."""
        self.forget(generation)
        with self._lock:
            holding = self._holdings.pop(generation, None)
            if holding is None:
                return
            holding.freed = True
            idle = holding.borrowers == 0
        if idle:
            self._close(holding)

    def keep_device(self, fd: OwnedFd) -> None:
        """Hold a GPU's device node open, in the fd store as well: its memory may go when nobody has it open."""
        self._device = fd
        if self._notifier.stores:
            self._notifier.store(DEVICE_NAME, fd)

    @property
    def keeps_device(self) -> bool:
        return self._device is not None

    def drop_device(self) -> None:
        if self._device is not None:
            self._remove([DEVICE_NAME])
            self._device.close()
            self._device = None

    def close(self) -> None:
        """The daemon ends: close what we hold. systemd decides what becomes of the fd store."""
        with self._lock:
            holdings, self._holdings = list(self._holdings.values()), {}
        for holding in holdings:
            self._close(holding)
        if self._device is not None:
            self._device.close()
            self._device = None

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:  # the manifest first: a set without it is dropped whatever else remains
            self._notifier.remove(name)
        self._notifier.barrier()

    @staticmethod
    def _close(holding: Holding) -> None:
        close_all([*holding.segments, holding.manifest])

    # --- restore --------------------------------------------------------------------------------------------------

    def restore(self, inherited: list[Inherited]) -> Iterator[tuple[int, Manifest]]:
        """Take back what the fd store kept; complete and valid shards only, oldest first. The rest leaves the store.

        One manifest at a time: those of large models take tens of MiB while they are read.
        """
        found: dict[tuple[str, int], _Remains] = {}
        for one in inherited:
            match = _NAME.fullmatch(one.name)
            if one.name == DEVICE_NAME and self._device is None:
                self._device = one.fd
            elif match is None or (match["kind"] == "seg") != (match["index"] is not None):
                log.warning("rank %d: dropping unknown descriptor %r from the fd store", self._rank, one.name)
                self._discard([one])
            else:
                remains = found.setdefault((match["fp"], int(match["generation"])), _Remains())
                if match["index"] is None:
                    remains.manifests.append(one)
                else:
                    remains.segments.setdefault(int(match["index"]), []).append(one)
        for (name, generation), remains in sorted(found.items(), key=lambda item: item[0][1]):
            manifest = self._restore_one(name, generation, remains)
            if manifest is not None:
                yield generation, manifest

    def _restore_one(self, name: str, generation: int, remains: _Remains) -> Manifest | None:
        try:
            manifest, segments = self._complete(name, generation, remains)
        except (WcacheError, OSError) as e:
            log.warning(
                "rank %d: dropping shard %s generation %d from the fd store: %s", self._rank, name, generation, e
            )
            self._discard(remains.all())
            return None
        with self._lock:
            self._holdings[generation] = Holding(name, generation, remains.manifests[0].fd, segments, stored=True)
        return manifest

    def _complete(self, name: str, generation: int, remains: _Remains) -> tuple[Manifest, list[OwnedFd]]:
        if generation in self._holdings:
            raise ManifestError("a second shard of that generation")
        if len(remains.manifests) != 1:
            raise ManifestError(f"{len(remains.manifests)} manifests: its publication was never completed")
        manifest = read_manifest(remains.manifests[0].fd)
        if not manifest.fingerprint.id.startswith(name):
            raise ManifestError(f"its manifest is that of shard {manifest.fingerprint.id[:12]}")
        wanted = set(range(len(manifest.segments)))
        have = {i for i, same in remains.segments.items() if len(same) == 1}
        if have != wanted or len(remains.segments) != len(wanted):
            raise ManifestError(f"{len(have & wanted)} of {len(wanted)} segments are there")
        segments = [remains.segments[i][0].fd for i in range(len(wanted))]
        check_shard(manifest, segments, self._rank, self._backend)
        return manifest, segments

    def _discard(self, remains: list[Inherited]) -> None:
        for name in {one.name for one in remains}:
            self._notifier.remove(name)
        close_all(one.fd for one in remains)


def check_shard(manifest: Manifest, segments: list[OwnedFd], rank: int, backend: BackendName) -> None:
    """What can be proven here about a shard that somebody handed to us. Raises ManifestError."""
    if manifest.rank != rank:
        raise ManifestError(f"a manifest of rank {manifest.rank}; this is rank {rank}")
    if manifest.backend is not backend:
        raise ManifestError(f"a manifest for backend {manifest.backend}; this rank's is {backend}")
    if len(manifest.segments) != len(segments):
        raise ManifestError(f"a manifest of {len(manifest.segments)} segments came with {len(segments)}")
    if backend is not BackendName.HOST:
        return  # a GPU allocation says nothing about itself; the checker child proves it
    for i, (spec, fd) in enumerate(zip(manifest.segments, segments, strict=True)):
        check_sealed(fd, i)
        length = os.fstat(fd.fileno()).st_size
        if length < spec.aligned_size:
            raise ManifestError(f"segment {i} has {length} bytes, {spec.aligned_size} were promised")


def check_sealed(fd: OwnedFd, index: int) -> None:
    if not is_sealed(fd):
        raise ManifestError(f"segment {index} is not a sealed memfd")


def read_manifest(fd: OwnedFd) -> Manifest:
    """Parse a manifest memfd; untrusted. Raises ManifestError."""
    if not is_sealed(fd):
        raise ManifestError("the manifest is not a sealed memfd")
    length = os.fstat(fd.fileno()).st_size
    if not 0 < length <= manifests.MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest of {length} bytes; 1 to {manifests.MAX_MANIFEST_BYTES} are allowed")
    with mmap.mmap(fd.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ) as data, memoryview(data) as view:
        return manifests.decode(view)


def _segment_name(name: str, generation: int, index: int) -> str:
    return f"seg.{name}.{generation}.{index}"


def _manifest_name(name: str, generation: int) -> str:
    return f"manifest.{name}.{generation}"
