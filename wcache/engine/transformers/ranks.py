# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a tensor parallel model attach together, or become those that publish.

Runs in engines whose processes load one model by Transformers' `tp_plan`; a group of one is any other engine. Every
function is collective: it is called by all ranks at the same point, and what goes wrong on one is a miss for all. The
leader asks its rank first, waiting for a publication in progress; the others follow; all hold a lease on the same
checkpoint, or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from wcache.engine.client import Attachment, as_miss
from wcache.engine.election import POINTLESS, Target, claim, run_for
from wcache.engine.group import Group, reason_number, reason_of, words
from wcache.engine.publish import Publication
from wcache.engine.transformers.request import Request, ask, identified
from wcache.errors import Miss, WcacheError
from wcache.model import MissReason, Mode

log = logging.getLogger(__name__)

_REFUSED, _GRANTED, _RESIDENT = range(3)
_groups: dict[int, Any] = {}

Made = TypeVar("Made")


def group_of(model: Any, load_config: Any) -> Group:
    """The processes that load this model together. Raises Miss(unsupported) for meshes other than tensor parallel."""
    if getattr(load_config, "device_mesh", None) is None:
        return Group()
    config = getattr(model.config, "distributed_config", None)
    sizes = {name: getattr(config, f"{name}_size", 1) for name in ("pp", "fsdp", "ep")}  # not every version has all
    if set(sizes.values()) != {1} or getattr(config, "enable_expert_parallel", False):
        raise Miss(MissReason.UNSUPPORTED, f"only tensor parallel models are shared, this one is spread by {sizes}")
    from torch import distributed

    return Group(distributed.get_rank(), distributed.get_world_size(), _on_cpu(distributed))


def _on_cpu(distributed: Any) -> Any:
    """A process group of all ranks that takes tensors on the CPU; None: the default one does."""
    world = distributed.group.WORLD
    if distributed.get_backend(world) == "gloo":
        return None
    if id(world) not in _groups:
        _groups[id(world)] = distributed.new_group(backend="gloo")
    return _groups[id(world)]


def together(make: Callable[[], Made], group: Group) -> Made:
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


def look(request: Request, target: Target, group: Group) -> tuple[Request, Attachment | Miss]:
    """Attach on all ranks or on none; a checkpoint that is not recognised is hashed if a rank is there."""
    found: Attachment | Miss | None = None
    if group.leads:
        request, found = _asked(request, target)
    hit, number = group.gather(_said(found))[0][:2]
    if not group.leads and hit:
        request, found = _asked(request, target)
    elif not group.leads:
        found = Miss(reason_of(number), "rank 0 of this engine had a miss; its log says more")
        if found.reason not in POINTLESS:
            request = _identified(request)
    assert found is not None
    return request, _all_or_none(found, group)


def _asked(request: Request, target: Target) -> tuple[Request, Attachment | Miss]:
    try:
        return ask(request, target)
    except WcacheError as e:
        return request, as_miss(e)


def _identified(request: Request) -> Request:
    try:
        return identified(request)
    except WcacheError as e:
        log.warning("this start will not be published: %s", e)
        return request


def _said(found: Attachment | Miss | None) -> list[int]:
    held = isinstance(found, Attachment)
    content = found.manifest.fingerprint.content if isinstance(found, Attachment) else None
    reason = found.reason if isinstance(found, Miss) else MissReason.UNSUPPORTED
    return [int(held), reason_number(reason), *words(content)]


def _all_or_none(found: Attachment | Miss, group: Group) -> Attachment | Miss:
    everyone = group.gather(_said(found))
    if isinstance(found, Miss):
        return found
    for rank, (hit, reason, *_) in enumerate(everyone):
        if not hit:
            found.close()
            return Miss(reason_of(reason), f"rank {rank} of this engine had a miss; its log says more")
    if any(said != everyone[0] for said in everyone):
        found.close()
        return Miss(MissReason.CONTENT, "the ranks of this engine were offered different checkpoints")
    return found


def elect(request: Request, target: Target, miss: Miss, group: Group) -> tuple[Attachment | Miss, Publication | None]:
    """After a miss: the right to publish, or an attachment if others published meanwhile, or the miss that stands."""
    if group.size == 1:
        return run_for(request.query, target, miss, request.survey.size)
    if not target.publish or target.mode is Mode.COPY:
        return miss, None
    publication, state = None, _REFUSED
    if group.leads and miss.reason not in POINTLESS:
        publication, state = _claimed(request, target, target.where.left_s)
    leader = group.gather([state])[0][0]
    if leader == _RESIDENT:
        _, found = look(request, target, group)
        if isinstance(found, Attachment):
            return found, None
        miss = found
    if not group.leads and leader != _REFUSED:
        # A leader that is resident alone means that a rank lost its shard: it publishes anew and waits for nobody.
        publication, _ = _claimed(request, target, target.where.left_s if leader == _GRANTED else 0.0)
    return miss, publication


def _claimed(request: Request, target: Target, wait_s: float) -> tuple[Publication | None, int]:
    if request.query.content is None:
        return None, _REFUSED
    try:
        publication = claim(request.query, target, request.survey.size // request.query.layout.tp_size, wait_s=wait_s)
    except (WcacheError, OSError) as e:
        log.warning("this start will not be published: %s", e)
        return None, _REFUSED
    return publication, _GRANTED if publication is not None else _RESIDENT
