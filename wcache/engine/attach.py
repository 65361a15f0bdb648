# SPDX-License-Identifier: Apache-2.0
"""The public functions for any PyTorch program: `attach`, `load_into`, `publish`.

Runs in engines. A hit maps what a rank holds; a miss says why and, unless `fallback` is off, loads from disk and gives
the result to the rank, so that the next start is a hit. The cache never takes an engine down: whatever goes wrong with
it is a typed miss. Of two engines that start cold together one reads the disk, the other waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from wcache import config
from wcache.config import CONNECT_TIMEOUT_S, STATE_TIMEOUT_S, Scope
from wcache.engine import cold, module
from wcache.engine.client import DISK, Attachment, as_miss, attach_shard, map_segments
from wcache.engine.entries import check
from wcache.engine.publish import Publication, begin, module_entries, state_entries
from wcache.engine.request import Request, prepare
from wcache.engine.tensors import gpu_uuid
from wcache.errors import Busy, ConfigError, Miss, PublishError, WcacheError
from wcache.log import MISSED, fields
from wcache.model import CPU, BackendName, IdentityPolicy, MissReason, Mode, Origin, Placement, Sizes
from wcache.protocol.connection import socket_path as path_of
from wcache.weights.digests import DigestStore
from wcache.weights.fingerprint import Fingerprint
from wcache.weights.identity import open_store
from wcache.weights.manifest import VERSION, Manifest
from wcache.weights.segment import Backend, open_backend

log = logging.getLogger(__name__)

_ROUNDS = 4  # of ask, wait for another writer, ask again
# A rank that answers so may still take what this engine loads.
_PUBLISHABLE = frozenset({
    MissReason.EMPTY, MissReason.LOADING, MissReason.CONTENT, MissReason.LAYOUT, MissReason.QUARANTINED,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Where:
    """Which rank is asked, and how long for."""

    path: Path
    name: str
    device: str | None
    connect_timeout_s: float
    state_timeout_s: float


def attach(
    model: str | os.PathLike[str],
    *,
    rank: int = 0,
    tp_size: int = 1,
    pp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    dtype: str | torch.dtype = "auto",
    plan: str | None = None,
    revision: str | None = None,
    mode: Mode | str = Mode.ZERO_COPY,
    fallback: bool = True,
    publish: bool = True,
    identity: IdentityPolicy | str = IdentityPolicy.CONTENT,
    device: str | None = None,
    socket_dir: str | os.PathLike[str] | None = None,
    socket_path: str | os.PathLike[str] | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    state_timeout_s: float = STATE_TIMEOUT_S,
    name: str | None = None,
) -> Attachment:
    """This rank's weights of a safetensors checkpoint directory: mapped from the cache, or loaded from disk.

    `rank` counts over the group (tp fastest, then pp, then dp). `dtype`: "auto" as in the checkpoint, else every
    floating tensor is cast to it. `plan`: a sharding plan's name or path where the architecture has none built in.
    `mode` "copy": private memory, and the cache is freed if nobody else holds it. `fallback` False: a miss raises.
    `publish` False: what was loaded from disk is not offered to the rank. `device`: "cpu", "cuda:N" or a GPU's UUID;
    by default wherever the rank has its weights. `state_timeout_s`: how long to wait for a load that is under way.
    The result's `tensors` maps every name to a tensor that stays valid as long as it is referenced.
    Raises CheckpointError, PlanError, ConfigError for bad input, Miss only without `fallback`.
    """
    placement = Placement(Sizes(tp_size, pp_size, dp_size, ep_size), rank)
    where = _Where(
        _socket(rank, socket_dir, socket_path),
        name or f"{Path(model).name} pid {os.getpid()}",
        _device(device),
        connect_timeout_s,
        state_timeout_s,
    )
    wanted = Mode(mode)
    with host_store() as store:
        start = time.perf_counter()
        request = prepare(
            os.fspath(model),
            placement,
            store,
            dtype=_dtype(dtype),
            plan=plan,
            revision=revision,
            policy=IdentityPolicy(identity),
        )
        held = _attach(request, store, where, wanted, fallback=fallback, publish=publish)
    if wanted is Mode.COPY:
        _take_copy(held)
    held.timing["total"] = time.perf_counter() - start
    held.timing["identify"] = held.timing["total"] - sum(v for k, v in held.timing.items() if k != "total")
    return held


def load_into(
    target: nn.Module,
    model: str | os.PathLike[str],
    *,
    init: Callable[[nn.Module], object] | None = None,
    **options: object,
) -> Attachment:
    """Fill a module that was built on the meta device; options as for `attach`.

    Parameters stand on the shared memory and do not require grad; buffers are private. `init(module)` computes buffers
    that no checkpoint carries. Raises StructureError naming every difference: nothing is bound then.
    """
    held = attach(model, **options)  # type: ignore[arg-type]
    try:
        module.fill(target, held.tensors, init=init)
    except BaseException:
        held.close()
        raise
    return held


def publish(
    source: nn.Module | dict[str, torch.Tensor],
    model: str | os.PathLike[str],
    *,
    rank: int = 0,
    tp_size: int = 1,
    pp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    dtype: str | torch.dtype = "auto",
    plan: str | None = None,
    revision: str | None = None,
    identity: IdentityPolicy | str = IdentityPolicy.CONTENT,
    repoint: bool = False,
    attributes: dict[str, object] | None = None,
    socket_dir: str | os.PathLike[str] | None = None,
    socket_path: str | os.PathLike[str] | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    state_timeout_s: float = STATE_TIMEOUT_S,
    name: str | None = None,
) -> Attachment | None:
    """Give a rank what this engine loaded itself from the checkpoint `model`; None: it was resident already.

    `repoint`: the module's parameters move onto the shared memory and their own memory is freed. `attributes`: plain
    values that belong to the weights. The weights must be those of the checkpoint at `rank`'s placement: the identity
    is the checkpoint's. Raises PublishError, Busy, Denied, Unavailable.
    """
    placement = Placement(Sizes(tp_size, pp_size, dp_size, ep_size), rank)
    path = _socket(rank, socket_dir, socket_path)
    entries = module_entries(source) if isinstance(source, nn.Module) else state_entries(source)
    check(entries, repoint=repoint)
    with host_store() as store:
        request = prepare(
            os.fspath(model),
            placement,
            store,
            dtype=_dtype(dtype),
            plan=plan,
            revision=revision,
            policy=IdentityPolicy(identity),
        ).identified(store)
    publication = begin(
        request.query(),
        path,
        bytes_total=sum(e.tensor.nbytes for e in entries),
        name=name or f"{Path(model).name} pid {os.getpid()}",
        device=_device_of(entries[0].tensor) if entries else None,
        wait_s=state_timeout_s,
        connect_timeout_s=connect_timeout_s,
    )
    if publication is None:
        return None
    return publication.write(entries, repoint=repoint, attributes=attributes)


# --- the two ways to a shard ------------------------------------------------------------------------------------------


def _attach(
    request: Request, store: DigestStore, where: _Where, mode: Mode, *, fallback: bool, publish: bool
) -> Attachment:
    """Attach; on a miss load from disk, or wait for whoever does. Raises Miss without `fallback`."""
    miss: Miss | None = None
    for _ in range(_ROUNDS):
        request, found = _ask(request, store, where, mode, hash_first=not fallback)
        if isinstance(found, Attachment):
            return found
        miss = found
        if not fallback:
            raise miss
        publication: Publication | None = None
        if publish and mode is Mode.ZERO_COPY and miss.reason in _PUBLISHABLE:
            try:
                publication = _begin(request, where)
            except Busy:
                continue  # somebody else is at it: ask again, which waits for them
            except WcacheError as e:
                log.warning("this start will not be published: %s", e)
            else:
                if publication is None:
                    continue  # resident since we asked
        return _from_disk(request, store, where, miss, publication)
    raise miss or Miss(MissReason.BUSY, f"{where.path}: others kept publishing")


def _ask(
    request: Request, store: DigestStore, where: _Where, mode: Mode, *, hash_first: bool
) -> tuple[Request, Attachment | Miss]:
    """Ask the rank. A checkpoint that is not recognised is hashed only if something is there that it could match."""
    found = _attach_once(request, where, mode)
    if isinstance(found, Attachment) or request.content is not None:
        return request, found
    request = request.recognised(store)
    nothing_there = found.reason in (MissReason.EMPTY, MissReason.NO_DAEMON, MissReason.DENIED)
    if request.content is None and (nothing_there and not hash_first):
        return request, found
    if request.content is None and not nothing_there:
        request = request.identified(store)
    return (request, _attach_once(request, where, mode)) if request.content is not None else (request, found)


def _attach_once(request: Request, where: _Where, mode: Mode) -> Attachment | Miss:
    try:
        held = attach_shard(
            request.query(),
            where.path,
            mode=mode,
            wait_s=where.state_timeout_s,
            connect_timeout_s=where.connect_timeout_s,
            name=where.name,
            device=where.device,
        )
    except WcacheError as e:
        return as_miss(e)
    log.info(
        "Mapped %d tensors from the weight cache daemon (%s mode)", len(held.manifest.tensors), mode,
        extra=fields(WCACHE_RANK=held.manifest.rank, WCACHE_FINGERPRINT=held.manifest.fingerprint.id),
    )  # fmt: skip
    return held


def _begin(request: Request, where: _Where) -> Publication | None:
    return begin(
        request.query(),
        where.path,
        bytes_total=request.survey.size // (request.placement.sizes.tp * request.placement.sizes.pp),
        name=where.name,
        device=where.device,
        connect_timeout_s=where.connect_timeout_s,
    )


def _from_disk(
    request: Request, store: DigestStore, where: _Where, miss: Miss, publication: Publication | None
) -> Attachment:
    """Load from disk, and publish if we may; a publication that fails costs the next start, not this one."""
    log.warning(
        "Weight cache unusable (%s); falling back to disk loading", f"{miss.reason}: {miss}",
        extra=fields(MESSAGE_ID=MISSED, WCACHE_REASON=miss.reason),
    )  # fmt: skip
    start = time.perf_counter()
    try:
        backend = publication.backend if publication is not None else _own_backend(where.device)
        loaded = cold.read(request, store, backend)
    except BaseException as e:
        if publication is not None:
            publication.abort(f"{type(e).__name__}: {e}")
        raise
    try:
        held: Attachment | None = None
        if publication is not None:
            try:
                held = publication.commit(
                    backend, loaded.fds, loaded.specs, loaded.storages, loaded.tensors, content=loaded.content
                )
            except WcacheError as e:
                log.warning("not published: %s", e)
        if held is None:
            held = _private(request, backend.name, backend.device, loaded)
    finally:
        loaded.close()
    held.source, held.miss = DISK, miss
    held.timing["load"] = time.perf_counter() - start
    return held


def _private(request: Request, backend: BackendName, device: str, loaded: cold.Cold) -> Attachment:
    """What was loaded, mapped by this process alone."""
    manifest = Manifest(
        version=VERSION,
        fingerprint=Fingerprint(loaded.content, request.layout),
        rank=request.placement.rank,
        backend=backend,
        device=device,
        origin=Origin.ENGINE,
        model=request.model,
        created=time.time(),
        segments=loaded.specs,
        storages=loaded.storages,
        tensors=loaded.tensors,
    )
    return Attachment(manifest, map_segments(manifest, loaded.fds), None, source=DISK)


def _take_copy(held: Attachment) -> None:
    """Copy mode: private memory now, and the cache is freed unless somebody else holds it."""
    start = time.perf_counter()
    held.mode = Mode.COPY
    _ = held.tensors
    released = held.release(evict=True)
    if released is not None:
        what = "freed" if released.evicted else f"kept: {released.holders} other engines hold it"
        log.info("the weight cache was copied; the shard is %s", what)
    held.timing["copy"] = time.perf_counter() - start


# --- options ----------------------------------------------------------------------------------------------------------


def _socket(rank: int, directory: str | os.PathLike[str] | None, path: str | os.PathLike[str] | None) -> Path:
    if path is not None:
        if directory is not None:
            raise ConfigError("socket_dir and socket_path exclude each other")
        return Path(path)
    return path_of(Path(directory) if directory is not None else default_socket_dir(), rank)


def host_store() -> DigestStore:
    """The digest store that this host's ranks use, as far as wcache.toml says."""
    scope = config.default_scope()
    return open_store(config.state_dir_of(config.load_or_default(scope), scope))


def default_socket_dir() -> Path:
    """Where ranks listen: as wcache.toml says, else the user's own agent's directory, else the system's."""
    scope = config.default_scope()
    host = config.load_or_default(scope)
    if host.socket_dir is not None:
        return Path(host.socket_dir)
    own = config.runtime_dir(scope)
    return own if own.is_dir() else config.runtime_dir(Scope.SYSTEM)


def _dtype(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(device: str | None) -> str | None:
    """ "cpu" or a GPU's UUID, from what torch would call it."""
    if device is None or device == CPU or device.startswith(("GPU-", "MIG-")):
        return device
    where = torch.device(device)
    if where.type != "cuda":
        raise ConfigError(f"device {device!r}: cpu, cuda:N or a GPU's UUID is expected")
    return gpu_uuid(where.index if where.index is not None else torch.cuda.current_device())


def _device_of(tensor: torch.Tensor) -> str:
    if tensor.device.type == CPU:
        return CPU
    if tensor.device.type != "cuda":
        raise PublishError(f"tensors on {tensor.device} cannot be shared")
    return gpu_uuid(tensor.device.index)


def _own_backend(device: str | None) -> Backend:
    return open_backend(BackendName.HOST if device in (None, CPU) else BackendName.CUDA, device or CPU)
