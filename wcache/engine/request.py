# SPDX-License-Identifier: Apache-2.0
"""What an engine or the loader child asks a rank for: a checkpoint, a placement, a layout, and its identity.

Built without reading a byte of weights. `content` stays None until the checkpoint is recognised, hashed, or loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from wcache.model import IdentityPolicy, Placement, Sizes
from wcache.protocol.messages import Query
from wcache.weights.checkpoint import Survey, survey
from wcache.weights.digests import DigestStore
from wcache.weights.fingerprint import LayoutKey
from wcache.weights.identity import Identity, identify, recognise, stamps_id
from wcache.weights.plan import Plan, plan_for
from wcache.weights.sharding import layout_key


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's question. `model`: the name people know it by."""

    model: str
    survey: Survey
    placement: Placement
    dtype: str
    plan: Plan
    layout: LayoutKey
    identity: Identity

    @property
    def content(self) -> str | None:
        return self.identity.content

    def query(self) -> Query:
        return Query(
            layout=self.layout,
            model=self.model,
            content=self.content,
            source=stamps_id(self.survey),
            policy=self.identity.policy,
        )

    def recognised(self, store: DigestStore) -> Request:
        """Look again: another process may have hashed the files meanwhile."""
        return replace(self, identity=recognise(self.survey, store, self.identity.policy))

    def identified(
        self, store: DigestStore, progress: Callable[[int, int], None] | None = None, *, by_name: bool = True
    ) -> Request:
        """Hash what is not known, or unless `by_name`, known by its name in a hub's cache. Raises CheckpointError."""
        found = identify(self.survey, store, self.identity.policy, by_name=by_name, progress=progress)
        return replace(self, identity=found)


def prepare(
    model: str,
    placement: Placement | None,
    store: DigestStore,
    *,
    dtype: str = "auto",
    plan: str | None = None,
    revision: str | None = None,
    policy: IdentityPolicy = IdentityPolicy.CONTENT,
    allow_stale_index: bool = False,
) -> Request:
    """Survey and recognise a checkpoint. Raises CheckpointError, PlanError, ConfigError."""
    found = survey(Path(model), revision=revision, allow_stale_index=allow_stale_index)
    place = placement or Placement(Sizes(), 0)
    chosen = plan_for(found.config, Path(plan) if plan is not None else None)
    layout = layout_key(found.config, place, dtype, chosen)
    known = recognise(found, store, policy)
    return Request(str(model), found, place, dtype, chosen, layout, known)
