# SPDX-License-Identifier: Apache-2.0
"""How the workers of one engine attach a shard together, or become the one that publishes it.

Runs in vLLM's workers; every function is collective. `look`: the leading rank attaches first, waiting for a publication
in progress; the others follow, and either all of them hold a lease on the same version or none does. `elect`: after a
miss the leader asks to be the single writer, so of two engines that start cold together one reads the disk.
vLLM asks for the bytes of external weights on another loader object than the one that loads: what `look` found there
is kept for the load, so that exactly the shard that was counted is attached.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wcache.engine.client import Attachment, as_miss, attach_shard
from wcache.engine.election import POINTLESS
from wcache.engine.group import reason_number, reason_of, words
from wcache.engine.publish import Publication, begin
from wcache.engine.vllm import drafts, support
from wcache.engine.vllm.group import Group
from wcache.engine.vllm.options import Options
from wcache.engine.vllm.request import Request, prepare
from wcache.engine.vllm.skeleton import Preview
from wcache.errors import Miss, WcacheError
from wcache.model import CPU, MissReason, Mode, Origin
from wcache.protocol.connection import connect
from wcache.protocol.messages import GetStatus, Status

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
    request = prepare(engine, model_config, options.identity, group)
    if isinstance(request, WcacheError):
        return Outcome(None, error=request)
    return attach(request, options, group)


def attach(request: Request, options: Options, group: Group) -> Outcome:
    outcome = Outcome(request, seconds={"identify": request.seconds})
    start = time.perf_counter()
    if group.leads:
        _attach(outcome, options)
    [hit, reason], *_ = group.gather([int(outcome.attachment is not None), _number(outcome.error)])
    if not group.leads and hit:
        _attach(outcome, options)
    elif not group.leads:
        outcome.error = Miss(reason_of(reason), "rank 0 of this engine had a miss; its log says more")
    _all_or_none(outcome, group)
    outcome.seconds["attach"] = time.perf_counter() - start
    return outcome


def _attach(outcome: Outcome, options: Options) -> None:
    """Ask this rank's daemon; a start that may not fall back waits for a daemon that is on its way."""
    deadline = time.monotonic() + options.state_timeout_s
    while True:
        try:
            outcome.attachment = _attach_once(outcome.request, options)
            return
        except WcacheError as e:
            outcome.error = as_miss(e)
        if options.fallback or outcome.error.reason not in _NOT_YET or time.monotonic() >= deadline:
            return
        time.sleep(_AGAIN_S)


def _attach_once(request: Request | None, options: Options) -> Attachment:
    assert request is not None
    return attach_shard(
        request.query,
        find_socket(request, options),
        mode=options.mode,
        wait_s=options.state_timeout_s,
        connect_timeout_s=options.connect_timeout_s,
        name=name_of(request),
        device=request.device,
    )


def _number(error: WcacheError | None) -> int:
    return reason_number(error.reason) if isinstance(error, Miss) else reason_number(MissReason.UNSUPPORTED)


def _all_or_none(outcome: Outcome, group: Group) -> None:
    """Every rank has a shard of the same checkpoint, or all give theirs back."""
    held = outcome.attachment
    content = held.manifest.fingerprint.content if held is not None else None
    everyone = group.gather([int(held is not None), _number(outcome.error), *words(content)])
    for rank, (hit, reason, *_) in enumerate(everyone):
        if not hit and held is not None:
            outcome.drop(Miss(reason_of(reason), f"rank {rank} of this engine had a miss; its log says more"))
            return
    if held is not None and any(said[2:] != everyone[0][2:] for said in everyone):
        outcome.drop(Miss(MissReason.CONTENT, "the ranks of this engine were offered different checkpoints"))


def may_publish(outcome: Outcome, options: Options) -> bool:
    """Whether this rank's daemon may want what this engine is going to load."""
    pointless = isinstance(outcome.error, Miss) and outcome.error.reason in POINTLESS
    return outcome.request is not None and options.publish and options.mode is not Mode.COPY and not pointless


def elect(outcome: Outcome, options: Options) -> Publication | None:
    """After a miss: the right to publish, or None. May find that others published meanwhile, and attach that."""
    request, group = outcome.request, Group.world()
    if request is None or not options.publish or options.mode is Mode.COPY:
        return None
    publication, state = None, _REFUSED
    if group.leads and may_publish(outcome, options):
        publication, state = _begin(request, options, options.state_timeout_s)
    leader = group.gather([state])[0][0]
    if leader == _RESIDENT:
        again = attach(request, options, group)
        outcome.attachment, outcome.error = again.attachment, again.error
        if outcome.attachment is not None:
            return None
    if not group.leads and leader != _REFUSED:
        # A leader that is resident alone means that a rank lost its shard: it publishes anew and waits for nobody.
        publication, _ = _begin(request, options, options.state_timeout_s if leader == _GRANTED else 0.0)
    return publication


_REFUSED, _GRANTED, _RESIDENT = range(3)


def _begin(request: Request, options: Options, wait_s: float) -> tuple[Publication | None, int]:
    """Ask to be the single writer; waits for a publication in progress."""
    try:
        publication = begin(
            request.query,
            find_socket(request, options),
            origin=Origin.ENGINE,
            bytes_total=request.survey.size // (request.query.layout.tp_size * request.query.layout.pp_size),
            name=name_of(request),
            device=request.device,
            wait_s=wait_s,
            connect_timeout_s=options.connect_timeout_s,
        )
    except WcacheError as e:
        log.warning("wcache: this start will not be published: %s", e)
        return None, _REFUSED
    return (publication, _GRANTED) if publication is not None else (None, _RESIDENT)


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


def name_of(request: Request) -> str:
    """What `wcache status` shows of this engine."""
    return f"vllm {Path(request.query.model).name} rank {request.rank} pid {os.getpid()}"
