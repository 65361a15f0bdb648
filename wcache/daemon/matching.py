# SPDX-License-Identifier: Apache-2.0
"""Which shard or publication a query means, and if none, how it differs from the nearest. Pure functions.

A hit needs equal content and equal layout. Only policy `trust` lets a query without content hit: its layout and its
model's label must equal those of exactly one resident shard. `source` finds a publication in progress, never a hit.
"""

from __future__ import annotations

from collections.abc import Iterable

from wcache.daemon.facts import NotHere, Publication, Shard, label
from wcache.errors import listed
from wcache.model import Difference, IdentityPolicy, MissReason
from wcache.protocol.messages import Query
from wcache.weights.fingerprint import CONTENT_FIELD, Fingerprint, differences, layout_id

DEVICE_FIELD = "device"
UNKNOWN = "<not known without reading>"


def named(shards: Iterable[Shard], query: Query) -> list[Shard]:
    """The shards a query names exactly, whatever their state; newest first."""
    if query.content is not None:
        wanted = Fingerprint(query.content, query.layout).id
        found = [s for s in shards if s.id == wanted]
    elif query.policy is IdentityPolicy.TRUST:
        layout = layout_id(query.layout)
        found = [
            s
            for s in shards
            if label(s.model) == label(query.model) and layout_id(s.fingerprint.layout) == layout and not s.superseded
        ]
        if len({s.id for s in found}) > 1:  # two checkpoints under one label: the label decides nothing
            return []
    else:
        return []
    return sorted(found, key=lambda s: s.generation, reverse=True)


def means(publication: Publication, query: Query) -> bool:
    """True if what is being published may be what the query wants (same layout, same or not yet known content)."""
    theirs = publication.query
    if layout_id(theirs.layout) != layout_id(query.layout):
        return False
    if theirs.content is not None and query.content is not None:
        return theirs.content == query.content
    if theirs.source is not None and query.source is not None:
        return theirs.source == query.source
    return label(theirs.model) == label(query.model)


def miss(shards: Iterable[Shard], query: Query) -> NotHere:
    """Why a query that names no shard is a miss: the nearest shard's differences, or nothing is there at all."""
    served = [s for s in shards if s.served]
    if not served:
        return NotHere(MissReason.EMPTY, "nothing is resident")
    compared = [(differences(query.content, query.layout, s.fingerprint), s) for s in served]
    found, nearest = min(compared, key=lambda pair: (len(pair[0]), -pair[1].generation))
    other = [d for d in found if d.field != CONTENT_FIELD]
    if other:
        return NotHere(MissReason.LAYOUT, _sentence(other, nearest), tuple(found), nearest.weight_bytes)
    if not found:
        found = [Difference(CONTENT_FIELD, UNKNOWN, nearest.fingerprint.content)]
        if query.policy is IdentityPolicy.TRUST:
            found = [Difference("model", query.model, nearest.model)]
    text = f"the checkpoint's content is not that of the resident shard {nearest.name} ({nearest.model})"
    if query.content is None:
        text = f"nothing says that the resident shard {nearest.name} ({nearest.model}) is this checkpoint"
    return NotHere(MissReason.CONTENT, text, tuple(found), nearest.weight_bytes)


def wrong_device(asked: str, resident: str, weight_bytes: int) -> NotHere:
    message = f"the engine runs on device {asked}, the shard is on {resident}"
    return NotHere(MissReason.DEVICE, message, (Difference(DEVICE_FIELD, asked, resident),), weight_bytes)


def _sentence(found: list[Difference], nearest: Shard) -> str:
    return f"{listed(found, 3)} (nearest shard {nearest.name})"
