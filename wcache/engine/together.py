# SPDX-License-Identifier: Apache-2.0
"""How the processes of one engine that reads checkpoints itself attach their shards, or become those that publish them.

Runs in engines and in preloads; a group of one is any other engine. Every function but `Request`'s is collective: it is
called by all ranks at the same point, and what goes wrong on one is a miss for all. The leader asks its rank first,
waiting for a publication in progress; the others follow; all hold a lease on the same checkpoint, or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from msgspec import structs

from wcache.engine import election
from wcache.engine.client import Attachment, as_miss
from wcache.engine.election import POINTLESS, Target, may_publish
from wcache.engine.group import Group, reason_number, reason_of, words
from wcache.engine.options import host_store
from wcache.engine.publish import Publication
from wcache.errors import CheckpointError, Miss, PublishError, WcacheError
from wcache.model import CheckpointFault, MissReason
from wcache.protocol.messages import Query
from wcache.weights.checkpoint import Survey, survey
from wcache.weights.identity import identify

log = logging.getLogger(__name__)

_REFUSED, _GRANTED, _RESIDENT = range(3)
_ELSEWHERE = "of this engine had a miss; its log says more"

Made = TypeVar("Made")
Asked = TypeVar("Asked", bound="Request")


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank asks for, made without reading a byte of weights. `device`: "cpu" or a GPU's UUID."""

    query: Query
    survey: Survey
    device: str

    @property
    def size(self) -> int:
        """About how many bytes are this rank's part."""
        layout = self.query.layout
        return self.survey.size // (layout.tp_size * layout.pp_size)

    def identified(self, progress: Callable[[int, int], None] | None = None) -> Self:
        """Hash the files that are not known; ranks of a host share that work. Raises CheckpointError.

        `progress`: called with bytes done and in total.
        """
        return self if self.query.content is not None else self._hashed(progress, by_name=True)

    def proven(self, progress: Callable[[int, int], None] | None = None) -> Self:
        """As `identified`, for whoever publishes: names in a hub's cache are not believed. Raises CheckpointError."""
        proven = self._hashed(progress, by_name=False)
        if self.query.content not in (None, proven.query.content):
            raise CheckpointError(
                CheckpointFault.CHANGED_WHILE_READING,
                f"{self.survey.directory}: the bytes of a file are not what its name in the hub's cache says",
                hint="download it again",
            )
        return proven

    def surveyed_again(self) -> Survey:
        """The same files as they are now. Raises WcacheError."""
        return survey(self.survey.directory)

    def check_unchanged(self) -> None:
        """Only then are the bytes that were loaded those that were identified. Raises PublishError."""
        was = self.survey
        try:
            now = self.surveyed_again()
            changed = (now.files, now.config_digests) != (was.files, was.config_digests)
        except WcacheError:
            changed = True
        if changed:
            raise PublishError(f"{was.directory} changed while it was being loaded")

    def _hashed(self, progress: Callable[[int, int], None] | None, *, by_name: bool) -> Self:
        with host_store() as store:
            found = identify(self.survey, store, self.query.policy, by_name=by_name, progress=progress)
        return replace(self, query=structs.replace(self.query, content=found.content))


def on_all(make: Callable[[], Made], group: Group) -> Made:
    """What `make` makes on every rank. Raises its error where it failed, and Miss on the other ranks."""
    made: Made | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as e:  # noqa: BLE001 - whatever it is, the other ranks must hear of it before it is raised
        error = e
    failed = [said[0] for said in group.gather([int(error is not None)])]
    if error is not None:
        raise error
    if any(failed):
        raise Miss(MissReason.UNSUPPORTED, f"rank {failed.index(1)} of this engine cannot use the cache; see its log")
    return made  # type: ignore[return-value]


def attach(request: Asked, ask: Callable[[Query], Attachment | Miss], group: Group) -> tuple[Asked, Attachment | Miss]:
    """Attach on all ranks or on none. Returns the request as it is known by then.

    `ask`: this process's rank. A checkpoint that is not recognised is hashed if a rank is there.
    """
    found: Attachment | Miss | None = None
    if group.leads:
        request, found = _ask(request, ask)
    hit, number = group.gather(_said(found))[0][:2]
    if not group.leads and hit:
        request, found = _ask(request, ask)
    elif not group.leads:
        found = Miss(reason_of(number), f"rank 0 {_ELSEWHERE}")
        if found.reason not in POINTLESS:
            request = _identified(request)
    assert found is not None
    return request, _all_or_none(found, group)


def _ask(request: Asked, ask: Callable[[Query], Attachment | Miss]) -> tuple[Asked, Attachment | Miss]:
    found = ask(request.query)
    if isinstance(found, Attachment) or found.reason in POINTLESS:
        return request, found
    try:
        known = request.identified()
    except WcacheError as e:
        return request, as_miss(e)
    return known, found if known is request else ask(known.query)


def _identified(request: Asked) -> Asked:
    try:
        return request.identified()
    except WcacheError as e:
        log.warning("the checkpoint has no identity: %s", e)
        return request


def _said(found: Attachment | Miss | None) -> list[int]:
    if isinstance(found, Attachment):
        return [1, 0, *words(found.manifest.fingerprint.content)]
    return [0, reason_number(found.reason if found is not None else MissReason.UNSUPPORTED), *words(None)]


def _all_or_none(found: Attachment | Miss, group: Group) -> Attachment | Miss:
    everyone = group.gather(_said(found))
    if isinstance(found, Miss):
        return found
    for rank, (hit, reason, *_) in enumerate(everyone):
        if not hit:
            found.close()
            return Miss(reason_of(reason), f"rank {rank} {_ELSEWHERE}")
    if any(said != everyone[0] for said in everyone):
        found.close()
        return Miss(MissReason.CONTENT, "the ranks of this engine were offered different checkpoints")
    return found


def elect(
    request: Request, target: Target, miss: Miss, ask: Callable[[Query], Attachment | Miss], group: Group
) -> tuple[Attachment | Miss, Publication | None]:
    """After a miss: the right to publish, or an attachment if others published meanwhile, or the miss that stands.

    `ask`: as for `attach`. `target.publish` and `target.mode` are the same on all ranks.
    """
    query = request.query
    if not may_publish(target.publish, target.mode):
        return miss, None
    contents = group.gather(words(_proven(request, miss)))
    if any(content != contents[0] for content in contents):
        log.warning("this start will not be published: the ranks of this engine see different checkpoints")
        return miss, None
    if contents[0] == words(None):
        return miss, None
    if group.size == 1:
        return election.elect(miss, target, lambda: election.claim(query, target, request.size), lambda: ask(query))
    publication, state = None, _REFUSED
    if group.leads and miss.reason not in POINTLESS:
        publication, state = _claim(request, target, target.where.left_s)
    leader = group.gather([state])[0][0]
    if leader == _RESIDENT:
        _, found = attach(request, ask, group)
        if isinstance(found, Attachment):
            return found, None
        miss = found
    if not group.leads and leader != _REFUSED:
        # A leader that is resident alone means that a rank lost its shard: it publishes anew and waits for nobody.
        publication, _ = _claim(request, target, target.where.left_s if leader == _GRANTED else 0.0)
    return miss, publication


def _proven(request: Request, miss: Miss) -> str | None:
    """The content that this rank may publish under."""
    if request.query.content is None or miss.reason in POINTLESS:
        return request.query.content
    try:
        return request.proven().query.content
    except WcacheError as e:
        log.warning("this start will not be published: %s", e)
        return None


def _claim(request: Request, target: Target, wait_s: float) -> tuple[Publication | None, int]:
    try:
        publication = election.claim(request.query, target, request.size, wait_s=wait_s)
    except (WcacheError, OSError) as e:
        log.warning("this start will not be published: %s", e)
        return None, _REFUSED
    return publication, _GRANTED if publication is not None else _RESIDENT
