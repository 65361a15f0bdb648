# SPDX-License-Identifier: Apache-2.0
"""What the workers of one vLLM engine ask their ranks, and what came of it. `look` and `elect` are collective.

vLLM asks for the bytes of external weights on another loader object than the one that loads: what `look` found there
is kept for the load, so that exactly the shard that was counted is attached.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wcache.engine import election, together
from wcache.engine.client import Attachment
from wcache.engine.election import POINTLESS, Target
from wcache.engine.options import Where
from wcache.engine.publish import Publication
from wcache.engine.vllm import drafts, support
from wcache.engine.vllm.group import Group
from wcache.engine.vllm.options import Options
from wcache.engine.vllm.request import Request, prepare
from wcache.engine.vllm.skeleton import Preview
from wcache.errors import Miss, WcacheError
from wcache.model import CPU, MissReason, Mode
from wcache.protocol.connection import connect
from wcache.protocol.messages import GetStatus, Query, Status

log = logging.getLogger(__name__)

_AGAIN_S = 0.5  # between two questions to a rank that is not there yet
_NOT_YET = (MissReason.NO_DAEMON, MissReason.LOADING)


@dataclass(slots=True)
class Outcome:
    """What asking came to: a lease on a shard, or why there is none. `request` None: nothing could be asked."""

    request: Request | None
    attachment: Attachment | None = None
    error: WcacheError | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    preview: Preview | None = None

    def take(self, found: Attachment | Miss) -> None:
        self.attachment = found if isinstance(found, Attachment) else None
        self.error = found if isinstance(found, Miss) else None

    def drop(self, error: WcacheError) -> None:
        """Give the lease back: this engine will not use it after all."""
        if self.attachment is not None:
            self.attachment.close()
        self.attachment, self.error = None, error


_kept: list[tuple[Any, Outcome]] = []


def keep(model_config: Any, outcome: Outcome) -> None:
    """Remember what was found for this model's configuration, itself and not only its address, until it loads."""
    _kept.append((model_config, outcome))


def kept(model_config: Any) -> Outcome | None:
    """What was found for this model before its memory was counted; handed out once."""
    for i, (whose, outcome) in enumerate(_kept):
        if whose is model_config:
            del _kept[i]
            return outcome
    return None


def look(vllm_config: Any, model_config: Any, options: Options) -> Outcome:
    """Attach on all ranks, or on none. `model_config`: the engine's main model or its draft."""
    engine = drafts.engine_config(vllm_config, model_config)
    why = support.alone(engine, model_config)
    if why is not None:
        return Outcome(None, error=why)
    group = Group.world()
    try:
        request = prepare(engine, model_config, options.identity, group)
        together.on_all(lambda: options.socket(request.rank), group)  # a path that no socket can have
    except WcacheError as e:
        return Outcome(None, error=e)
    outcome, start = Outcome(request, seconds={"identify": request.seconds}), time.perf_counter()
    outcome.request, found = together.attach(request, _asking(request, options), group)
    outcome.take(found)
    outcome.seconds["attach"] = time.perf_counter() - start
    return outcome


def _asking(request: Request, options: Options) -> Callable[[Query], Attachment | Miss]:
    """Asks this worker's rank; a start that may not fall back waits for a daemon that is on its way."""
    deadline = time.monotonic() + options.state_timeout_s

    def ask(query: Query) -> Attachment | Miss:
        while True:
            found = election.look(query, target(request, options, deadline))
            late = options.fallback or time.monotonic() >= deadline
            if isinstance(found, Attachment) or found.reason not in _NOT_YET or late:
                return found
            time.sleep(_AGAIN_S)

    return ask


def target(request: Request, options: Options, deadline: float) -> Target:
    """Whom this worker asks, until when (time.monotonic())."""
    name = f"vllm {Path(request.query.model).name} rank {request.rank} pid {os.getpid()}"
    path = find_socket(request, options)
    where = Where(path, name, request.device, options.connect_timeout_s, deadline)
    return Target(where, options.mode, options.publish)


def may_publish(outcome: Outcome, options: Options) -> bool:
    """Whether this rank's daemon may want what this engine is going to load."""
    pointless = isinstance(outcome.error, Miss) and outcome.error.reason in POINTLESS
    return outcome.request is not None and election.may_publish(options.publish, options.mode) and not pointless


def elect(outcome: Outcome, options: Options) -> Publication | None:
    """After a miss: the right to publish, or None. May find that others published meanwhile, and attach that."""
    request, miss = outcome.request, outcome.error
    if request is None:
        return None
    assert isinstance(miss, Miss)
    asked = target(request, options, time.monotonic() + options.state_timeout_s)
    found, publication = together.elect(request, asked, miss, _asking(request, options), Group.world())
    outcome.take(found)
    return publication


def external_bytes(outcome: Outcome, options: Options) -> int:
    """Bytes on the device that the weights take outside vLLM's own allocations, now and after the load.

    A copying engine ends with the weights in its own memory and the shard freed, unless others hold it too: then the
    shard stays, and both copies are counted by what vLLM measures.
    """
    held = outcome.attachment
    if held is None:
        return 0
    if options.mode is Mode.COPY and _holders(outcome, options) != 1:
        return 0
    return held.manifest.segment_bytes


def _holders(outcome: Outcome, options: Options) -> int:
    """Leases on the attached shard, ours among them; 0 if the rank does not say."""
    assert outcome.request is not None and outcome.attachment is not None
    path = find_socket(outcome.request, options)
    try:
        with connect(path, role="engine", name="wcache-holders", timeout_s=options.connect_timeout_s) as connection:
            shards = connection.ask(GetStatus(), Status).status.shards
    except WcacheError as e:
        log.warning("rank %d does not say who holds the shard: %s", outcome.request.rank, e)
        return 0
    return sum(len(s.leases) for s in shards if s.fingerprint == outcome.attachment.manifest.fingerprint.id)


def find_socket(request: Request, options: Options) -> Path:
    """The socket of this worker's rank: by its number, or by its GPU where another rank has that number."""
    path = options.socket(request.rank)
    if request.device == CPU or options.socket_path is not None:
        return path
    for candidate in (path, *sorted(options.directory().glob("rank-*.sock"))):
        if _device_at(candidate, options) == request.device:
            return candidate
    return path


def _device_at(path: Path, options: Options) -> str | None:
    try:
        with connect(path, role="engine", name="wcache-find", timeout_s=options.connect_timeout_s) as connection:
            return connection.welcome.device
    except WcacheError:
        return None
