# SPDX-License-Identifier: Apache-2.0
"""What `wcache explain` finds out: for each rank a hit or a miss, its fields, and what a miss would cost.

The question is built exactly as a loader or an engine builds it. Ranks that run are asked (an Explain takes no lease
and counts as no miss); for the others the answer is `no_daemon`, with the same cost. For the vllm and transformers
loaders, whose layout only their engine can compute, the resident shard's layout is taken with the options put over it.
"""

from __future__ import annotations

import dataclasses
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from wcache.cli.context import Context
from wcache.cli.hashing import meter
from wcache.cli.ranks import ask_all, chosen
from wcache.cli.render import duration, short, value
from wcache.config import Config, Loader, Parallel
from wcache.daemon.status import size
from wcache.engine.request import Request, prepare
from wcache.errors import ConfigError, NoSuchRank, NotReady, PlanError, WcacheError
from wcache.model import BackendName, MissReason, Placement
from wcache.protocol.connection import Connection
from wcache.protocol.messages import Explain, Explained, GetStatus, MissInfo, Query, Status, WireDifference
from wcache.weights.checkpoint import Checkpoint, open_checkpoint
from wcache.weights.digests import DigestStore
from wcache.weights.identity import open_store
from wcache.weights.layout import pack
from wcache.weights.sharding import shard

GPU_GRANULARITY = 2 << 20  # bytes; what cuMemGetAllocationGranularity says of every GPU so far


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked, over what is configured. None: as configured."""

    model: str
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    hash_unknown: bool = True


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `hit`: the shard's fingerprint. Bytes: `read_bytes` from disk, `memory_bytes` on the device."""

    rank: int
    model: str
    content: str | None
    hit: str | None
    reason: MissReason | None = None
    message: str = ""
    differences: tuple[WireDifference, ...] = ()
    read_bytes: int | None = None
    hash_bytes: int = 0
    memory_bytes: int | None = None
    note: str = ""
    missed: MissInfo | None = None


def explain(context: Context, asked: Options, only: int | None) -> list[Answer]:
    """Ask as an engine of the given sizes would. Raises CheckpointError, PlanError, ConfigError, NoSuchRank."""
    config = _config(context.config, asked)
    world = config.parallel.sizes.world
    if only is not None and only >= world:
        raise NoSuchRank(f"rank {only} is not one of the group's {world} ranks")
    ranks = [only] if only is not None else list(_ranks(context.config, config))
    with open_store(context.state_dir) as store:
        requests = _requests(config, asked, ranks, store)
    checkpoint = open_checkpoint(next(iter(requests.values())).survey)
    foreign = context.config.loader is not Loader.SAFETENSORS

    def ask(rank: int, connection: Connection) -> Explained:
        query = requests[rank].query()
        if foreign:
            query = _like_resident(query, connection, asked, config.placement(rank))
        return connection.ask(Explain(query=query), Explained)

    here = [rank for rank in ranks if rank in context.config.ranks]
    answers = ask_all(context, here, ask)
    return [_answer(config, requests[rank], checkpoint, rank, answers.get(rank), foreign) for rank in ranks]


def last(context: Context, only: int | None) -> list[Answer]:
    """Ask again what an engine last missed."""

    def ask(_: int, connection: Connection) -> tuple[MissInfo, Explained] | None:
        missed = connection.ask(GetStatus(), Status).status.last_miss
        if missed is None:
            return None
        return missed, connection.ask(Explain(query=missed.request), Explained)

    found = []
    errors: list[WcacheError] = []
    for rank, answer in ask_all(context, chosen(context.config, only), ask).items():
        if isinstance(answer, WcacheError):
            errors.append(answer)
        elif answer is not None:
            missed, said = answer
            query = missed.request
            found.append(_said(rank, query.model, query.content, said, missed=missed))
    if errors and not found:
        raise errors[0]
    if not found:
        raise NotReady("no engine had a miss since the ranks started", hint="wcache explain DIR asks in its place")
    return found


def _config(config: Config, asked: Options) -> Config:
    """The configuration with the options put over it; sizes that are asked for may belong to another group."""
    names = {"tp_size": asked.tp, "pp_size": asked.pp, "dp_size": asked.dp, "ep_size": asked.ep}
    sizes = {name: size for name, size in names.items() if size is not None}
    parallel: Parallel = msgspec.structs.replace(config.parallel, **sizes)
    dtype = config.dtype if asked.dtype is None else asked.dtype
    return msgspec.structs.replace(config, parallel=parallel, dtype=dtype, model=asked.model)


def _ranks(configured: Config, asked: Config) -> Iterator[int]:
    """This host's ranks; those of the asked group, if that is another one."""
    world = asked.parallel.sizes.world
    if world == configured.parallel.sizes.world:
        yield from configured.ranks
    else:
        yield from range(world)


def _requests(config: Config, asked: Options, ranks: list[int], store: DigestStore) -> dict[int, Request]:
    requests: dict[int, Request] = {}
    for rank in ranks:
        request = prepare(
            asked.model, config.placement(rank), store,
            dtype=config.dtype, plan=config.plan, revision=config.revision, policy=config.identity,
            allow_stale_index=config.allow_stale_index,
        )  # fmt: skip
        if request.content is None and asked.hash_unknown:
            with meter(request.survey) as progress:
                request = request.identified(store, progress)
        if asked.quantization is not None:
            layout = msgspec.structs.replace(request.layout, quantization=_quantization(asked.quantization))
            request = dataclasses.replace(request, layout=layout)
        requests[rank] = request
    return requests


def _quantization(text: str) -> dict[str, Any] | None:
    """A method's name, a JSON object, or "none"."""
    if text == "none":
        return None
    if not text.lstrip().startswith("{"):
        return {"quant_method": text}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as e:
        raise ConfigError(f"--quantization: {e}") from e


def _like_resident(query: Query, connection: Connection, asked: Options, placement: Placement) -> Query:
    """The layout of the newest resident shard, with what was asked put over it."""
    shards = connection.ask(GetStatus(), Status).status.shards
    if not shards:
        return query
    over: dict[str, Any] = {}
    for name in ("tp", "pp", "dp", "ep"):
        if getattr(asked, name) is not None:
            over[f"{name}_size"] = getattr(placement.sizes, name)
            over[f"{name}_rank"] = getattr(placement, f"{name}_rank")
    if asked.dtype is not None:
        over["dtype"] = asked.dtype
    if asked.quantization is not None:
        over["quantization"] = _quantization(asked.quantization)
    newest = max(shards, key=lambda s: s.generation)
    return msgspec.structs.replace(query, layout=msgspec.structs.replace(newest.layout, **over))


def _answer(
    config: Config,
    request: Request,
    checkpoint: Checkpoint,
    rank: int,
    said: Explained | WcacheError | None,
    foreign: bool,
) -> Answer:
    cost = _cost(config, request, checkpoint, foreign)
    if isinstance(said, Explained):
        return _said(rank, request.model, request.content, said, **({} if said.hit is not None else cost))
    message = "this host has no such rank" if said is None else str(said)
    return Answer(
        rank=rank, model=request.model, content=request.content, hit=None, reason=MissReason.NO_DAEMON,
        message=message, **cost,
    )  # fmt: skip


def _said(rank: int, model: str, content: str | None, said: Explained, **more: Any) -> Answer:
    return Answer(
        rank=rank, model=model, content=content, hit=said.hit, reason=said.reason, message=said.message,
        differences=said.differences, **more,
    )  # fmt: skip


def _cost(config: Config, request: Request, checkpoint: Checkpoint, foreign: bool) -> dict[str, Any]:
    """What a cold start would read and take. An engine's own loader reads and keeps about the whole checkpoint."""
    unknown = {f.name: f.stamp.size for f in request.survey.files if f.name in request.identity.unknown}
    if foreign:
        note = f"the {config.loader} loader decides itself; these are the checkpoint's bytes over its tp and pp ranks"
        part = request.survey.size // (config.parallel.tp_size * config.parallel.pp_size)
        return {"read_bytes": request.survey.size, "memory_bytes": part, "note": note}
    try:
        plan = shard(checkpoint, request.plan, request.placement, request.dtype)
    except PlanError as e:
        return {"note": str(e)}
    granularity = mmap.PAGESIZE if config.backend is BackendName.HOST else GPU_GRANULARITY
    read = sum(piece.rows * piece.run for tensor in plan.tensors for piece in tensor.pieces)
    memory = pack([t.nbytes for t in plan.tensors], granularity).aligned_bytes
    return {"read_bytes": read, "hash_bytes": sum(unknown.values()), "memory_bytes": memory}


def lines(answers: list[Answer]) -> Iterator[str]:
    """For people: one block a rank."""
    for a in answers:
        if a.missed is not None:
            since = duration(time.time() - a.missed.when)
            yield f"rank {a.rank}: {a.missed.engine} missed {since} ago; asked again now:"
        if a.hit is not None:
            yield f"rank {a.rank}: hit: shard {a.hit[:12]} of {a.model}"
            continue
        yield f"rank {a.rank}: miss: {a.reason}" + ("" if a.differences else f": {short(a.message)}")
        for d in a.differences:
            yield f"        {d.field}: asked {value(d.asked)}, resident {value(d.resident)}"
        if a.content is None:
            yield "        the checkpoint's content is not known without reading it (leave --no-hash out)"
        if a.read_bytes is not None and a.memory_bytes is not None:
            more = f" (and {size(a.hash_bytes)} hashed)" if a.hash_bytes else ""
            yield f"        a cold start reads {size(a.read_bytes)}{more} and needs {size(a.memory_bytes)} of memory"
        if a.note:
            yield f"        {a.note}"
