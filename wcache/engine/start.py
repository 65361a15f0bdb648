# SPDX-License-Identifier: Apache-2.0
"""One start of an engine: the shard from the cache, or from disk and then into the cache.

Runs in engines. A checkpoint that is not recognised is hashed only if something resident could be it. Of several
engines that start cold together one reads the disk, the others wait for it until their deadline. Whatever goes wrong
with the cache is a typed miss; what goes wrong with the checkpoint is the caller's error.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from wcache.engine import cold
from wcache.engine import tensors as wrapping
from wcache.engine.client import DISK, Attachment, map_segments
from wcache.engine.election import Target, claim, elect, look, release_copy, say_mapped, say_missed
from wcache.engine.publish import Publication
from wcache.engine.request import Request
from wcache.engine.timing import Stopwatch
from wcache.errors import Miss, OutOfMemory, WcacheError
from wcache.model import CPU, BackendName, MissReason, Mode, Origin
from wcache.weights.digests import DigestStore
from wcache.weights.fingerprint import Fingerprint
from wcache.weights.manifest import VERSION, Manifest
from wcache.weights.segment import Access, Backend, open_backend

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Start:
    """What one start is about."""

    request: Request
    store: DigestStore
    target: Target
    watch: Stopwatch
    access: Access | None = None

    def from_cache(self) -> Attachment | Miss:
        """Attach, or say why not. Raises CheckpointError when the checkpoint cannot even be hashed."""
        found = self._ask()
        if isinstance(found, Attachment) or self.request.content is not None:
            return found
        self.request = self.request.recognised(self.store)
        if self.request.content is None and found.reason is not MissReason.CONTENT:
            return found  # nothing is there that it could be: it is hashed while it is loaded
        if self.request.content is None:
            self.request = self.request.identified(self.store)
        self.watch.lap("identify")
        return self._ask()

    def from_cache_or_disk(self) -> Attachment:
        """Attach; on a miss load from disk, or wait for whoever does."""
        found, publication = self.from_cache(), None
        if isinstance(found, Miss):
            found, publication = elect(found, self.target, self._claim, self.from_cache)
        return found if isinstance(found, Attachment) else self._from_disk(found, publication)

    # --- the cache ---------------------------------------------------------------------------------------------------

    def _ask(self) -> Attachment | Miss:
        found = look(self.request.query(), self.target, access=self.access, watch=self.watch)
        if isinstance(found, Attachment):
            say_mapped(found)
        else:
            self.watch.lap("connect")
        return found

    def _claim(self) -> Publication | None:
        sizes = self.request.placement.sizes
        return claim(self.request.query(), self.target, self.request.survey.size // (sizes.tp * sizes.pp))

    # --- the disk ----------------------------------------------------------------------------------------------------

    def _from_disk(self, miss: Miss, publication: Publication | None) -> Attachment:
        """Load, and publish if we may; a publication that fails costs the next start, not this one."""
        say_missed(miss)
        self.watch.lap("connect")
        backend, publication = self._backend(publication)
        try:
            loaded = cold.read(self.request, self.store, backend)
        except BaseException as e:
            if publication is not None:
                publication.abort(f"{type(e).__name__}: {e}")
            raise
        self.watch.lap("load")
        try:
            held = self._published(publication, backend, loaded) or self._private(backend, loaded)
        finally:
            loaded.close()
        held.source, held.miss = DISK, miss
        self.watch.lap("publish" if held.lease is not None else "map")
        return held

    def _backend(self, publication: Publication | None) -> tuple[Backend, Publication | None]:
        """The rank's kind of memory if we can have it, else our own and no publication."""
        if publication is not None:
            try:
                return publication.backend, publication
            except WcacheError as e:
                publication.abort(str(e))
                log.warning("this start will not be published: %s", e)
        device = self.target.where.device or CPU
        return open_backend(BackendName.HOST if device == CPU else BackendName.CUDA, device), None

    def _published(self, publication: Publication | None, backend: Backend, loaded: cold.Cold) -> Attachment | None:
        if publication is None:
            return None
        try:
            return publication.commit(
                backend, loaded.fds, loaded.specs, loaded.storages, loaded.tensors, content=loaded.content
            )
        except (WcacheError, OSError) as e:
            log.warning("this start was not published: %s", e)
            return None

    def _private(self, backend: Backend, loaded: cold.Cold) -> Attachment:
        """What was loaded, mapped by this process alone and writable."""
        manifest = Manifest(
            version=VERSION,
            fingerprint=Fingerprint(loaded.content, self.request.layout),
            rank=self.request.placement.rank,
            backend=backend.name,
            device=backend.device,
            origin=Origin.ENGINE,
            model=self.request.model,
            created=time.time(),
            segments=loaded.specs,
            storages=loaded.storages,
            tensors=loaded.tensors,
        )
        return Attachment(manifest, map_segments(manifest, loaded.fds, Access.READ_WRITE), None, source=DISK)


def take_copy(held: Attachment) -> None:
    """Copy mode: private memory now, and the cache is freed unless somebody else holds it.

    What was loaded from disk by this process is private as it is. Raises OutOfMemory: for a moment both copies exist.
    """
    held.mode = Mode.COPY
    if held.lease is None:
        held.adopt(wrapping.wrap(held.manifest, held.mapping))
        return
    needed = held.manifest.weight_bytes
    free = open_backend(held.manifest.backend, held.manifest.device).available()
    if needed > free:
        raise OutOfMemory(
            f"copy mode needs {needed} bytes on {held.manifest.device} beside the cache's own, {free} are free",
            hint="zero_copy mode needs no second copy",
        )
    held.adopt(wrapping.copy(held.manifest, held.mapping))
    release_copy(held)
