# SPDX-License-Identifier: Apache-2.0
"""The public functions for any PyTorch program: `attach`, `load_into`, `publish`.

Runs in engines. A hit maps what a rank holds; a miss says why and, unless `fallback` is off, loads from disk and gives
the result to the rank, so that the next start is a hit. The cache never takes an engine down: whatever goes wrong with
it is a typed miss. Of two engines that start cold together one reads the disk, the other waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from wcache.config import CONNECT_TIMEOUT_S, STATE_TIMEOUT_S
from wcache.engine import module, values
from wcache.engine.claim import claimed
from wcache.engine.client import Attachment, as_miss
from wcache.engine.election import Target
from wcache.engine.entries import check
from wcache.engine.options import default_socket_dir as default_socket_dir
from wcache.engine.options import device_of, device_option, dtype_option, host_store, where
from wcache.engine.publish import begin
from wcache.engine.request import prepare
from wcache.engine.start import Start, take_copy
from wcache.engine.state import module_entries, state_entries
from wcache.engine.timing import Stopwatch
from wcache.engine.training import guard
from wcache.engine.values import plain_attributes
from wcache.errors import Miss, OutOfMemory, StructureError
from wcache.model import IdentityPolicy, Kind, Mode, Placement, Sizes
from wcache.weights.fingerprint import LayoutKey
from wcache.weights.identity import unmoved
from wcache.weights.segment import Access


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
    layout: LayoutKey | None = None,
    mode: Mode | str = Mode.ZERO_COPY,
    fallback: bool = True,
    publish: bool = True,
    identity: IdentityPolicy | str = IdentityPolicy.CONTENT,
    allow_stale_index: bool = False,
    device: str | torch.device | None = None,
    access: Access | str | None = None,
    socket_dir: str | os.PathLike[str] | None = None,
    socket_path: str | os.PathLike[str] | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    state_timeout_s: float = STATE_TIMEOUT_S,
    name: str | None = None,
) -> Attachment:
    """This rank's weights of a safetensors checkpoint directory: mapped from the cache, or loaded from disk.

    `rank` counts over the group (tp fastest, then pp, then dp). `dtype`: "auto" as in the checkpoint, else every
    floating tensor is cast to it. `plan`: a sharding plan's name or path where the architecture has none built in.
    `layout`: ask for what an engine published under a layout of its own; nothing can be loaded in its place, so that a
    miss raises. `allow_stale_index`: an index of other files is ignored if those that are there are a complete set.
    `mode` "copy": private memory, and the cache is freed if nobody else holds it. `fallback` False: a miss raises.
    `publish` False: what was loaded from disk is not offered to the rank. `device`: "cpu", "cuda:N" or a GPU's
    UUID; by default wherever the rank has its weights. `access` "rw" maps a GPU's resident shard writable: a write then
    changes what every engine computes with, and the shard's digest; by default GPU memory is read-only and host pages
    are private. `state_timeout_s`: how long to wait for a load under way.
    The result's `tensors` maps every name to a tensor that stays valid as long as it is referenced.
    Raises CheckpointError, PlanError, ConfigError for bad input, Miss only without `fallback` (or with `layout`).
    """
    watch = Stopwatch()
    place = where(
        model, rank, socket_dir=socket_dir, path=socket_path, name=name, device=device_option(device),
        connect_timeout_s=connect_timeout_s, state_timeout_s=state_timeout_s,
    )  # fmt: skip
    wanted = Mode(mode)
    with host_store() as store:
        request = prepare(
            os.fspath(model),
            Placement(Sizes(tp_size, pp_size, dp_size, ep_size), rank),
            store,
            dtype=dtype_option(dtype),
            plan=plan,
            revision=revision,
            policy=IdentityPolicy(identity),
            allow_stale_index=allow_stale_index,
        )
        if layout is not None:
            request = replace(request, layout=layout)
        watch.lap("identify")
        start = Start(request, store, Target(place, wanted, publish), watch, None if access is None else Access(access))
        held = start.from_cache_or_disk() if fallback and layout is None else _hit(start.from_cache())
    try:
        if wanted is Mode.COPY:
            take_copy(held)
        _ = held.tensors
    except BaseException as e:
        held.close()
        if isinstance(e, OutOfMemory):
            raise as_miss(e) from e
        raise
    watch.lap("copy" if wanted is Mode.COPY else "bind")
    held.timing = watch.timing()
    return held


def _hit(found: Attachment | Miss) -> Attachment:
    if isinstance(found, Miss):
        raise found
    return found


def load_into(
    target: nn.Module,
    model: str | os.PathLike[str],
    *,
    init: Callable[[nn.Module], object] | None = None,
    requires_grad: bool = False,
    **options: object,
) -> Attachment:
    """Fill a module that was built on the meta device; options as for `attach`.

    Parameters stand on the shared memory and do not require grad (made to, they raise TrainingRefused where a gradient
    arrives); buffers are private. `init(module)` computes buffers that no checkpoint carries; `wcache.init_buffers`
    does for Transformers' modules. `requires_grad`: only in copy mode, because shared weights cannot be trained.
    Raises StructureError naming every difference (nothing is bound then), and whatever `attach` raises.
    """
    if requires_grad and Mode(str(options.get("mode", Mode.ZERO_COPY))) is not Mode.COPY:
        raise StructureError(
            "parameters on shared memory cannot be trained",
            hint="mode='copy' gives this process weights of its own; or leave requires_grad off",
        )
    held = attach(model, **options)  # type: ignore[arg-type]
    watch = Stopwatch()
    try:
        attributes = {name: values.decode(value) for name, value in held.manifest.attributes.items()}
        kinds = {name: t.kind for t in held.manifest.tensors for name in t.names}
        tensors = {n: t for n, t in held.tensors.items() if kinds[n] is not Kind.ATTRIBUTE}
        attributes |= {n: t for n, t in held.tensors.items() if kinds[n] is Kind.ATTRIBUTE}
        module.fill(target, tensors, init=init, attributes=attributes, requires_grad=requires_grad)
        if held.lease is not None and held.mode is Mode.ZERO_COPY:
            guard(target)
    except BaseException:
        held.close()
        raise
    watch.lap("bind")
    held.add_time(watch)
    return held


def publish(
    source: nn.Module | Mapping[str, torch.Tensor],
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
    layout: LayoutKey | None = None,
    identity: IdentityPolicy | str = IdentityPolicy.CONTENT,
    allow_stale_index: bool = False,
    repoint: bool = False,
    attributes: Collection[str] = (),
    socket_dir: str | os.PathLike[str] | None = None,
    socket_path: str | os.PathLike[str] | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    state_timeout_s: float = STATE_TIMEOUT_S,
    name: str | None = None,
) -> Attachment | None:
    """Give a rank what this engine loaded itself from the checkpoint `model`; None: it was resident already.

    Without `layout` it must be what the checkpoint says at `rank`'s placement (names, shapes, dtypes are compared, and
    samples of the bytes); then any `attach` of the checkpoint can have it. With a `layout` of the caller's own,
    anything that the engine made of the checkpoint can be published, non-persistent buffers and the module's declared
    `attributes` (dotted names; tensors or plain values) included; `attach` and `load_into` with that layout have it.
    `repoint`: the module's parameters move onto the published memory and their own is freed.
    Raises PublishError, Busy, Denied, Unavailable, CheckpointError.
    """
    if isinstance(source, nn.Module):
        entries, plain = module_entries(source, attributes), plain_attributes(source, attributes)
    else:
        entries, plain = state_entries(source), {}
    check(entries, repoint=repoint)
    place = where(
        model, rank, socket_dir=socket_dir, path=socket_path, name=name,
        device=device_of(entries[0].tensor) if entries else None,
        connect_timeout_s=connect_timeout_s, state_timeout_s=state_timeout_s,
    )  # fmt: skip
    with host_store() as store:
        request = prepare(
            os.fspath(model),
            Placement(Sizes(tp_size, pp_size, dp_size, ep_size), rank),
            store,
            dtype=dtype_option(dtype),
            plan=plan,
            revision=revision,
            policy=IdentityPolicy(identity),
            allow_stale_index=allow_stale_index,
        ).identified(store, by_name=False)
    if layout is None:
        entries = claimed(entries, request)
    else:
        request = replace(request, layout=layout)
    publication = begin(
        request.query(),
        place.path,
        bytes_total=sum(e.tensor.nbytes for e in entries),
        name=place.name,
        device=place.device,
        wait_s=place.left_s,
        connect_timeout_s=place.connect_timeout_s,
    )
    if publication is None:
        return None
    read = request.survey
    return publication.write(entries, repoint=repoint, attributes=plain, last=lambda: unmoved(read, read.files))
