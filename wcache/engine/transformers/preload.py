# SPDX-License-Identifier: Apache-2.0
"""The preload of `loader = "transformers"`: Transformers' own loading in a child, published, then gone.

Runs in the loader child that a daemon starts. `engine_args` of wcache.toml are arguments of from_pretrained, and
`auto_class`; an engine with the same arguments asks for exactly what is published here. One device per rank; the ranks
of a tensor parallel model load together, because Transformers places their tensors on a mesh of processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wcache.config import Config
from wcache.engine.election import Target
from wcache.engine.loader import device_of
from wcache.engine.options import where
from wcache.engine.publish import Publication
from wcache.engine.rendezvous import meet
from wcache.engine.tensors import torch_device
from wcache.engine.transformers.load import AlreadyResident, Load, class_of
from wcache.errors import ConfigError, LoaderError, Miss
from wcache.model import CPU
from wcache.protocol.messages import ProgressInfo

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.25
# Decided by other keys of wcache.toml.
_TAKEN = {
    "dtype": "dtype", "torch_dtype": "dtype", "revision": "revision", "device_map": "devices",
    "tp_plan": "parallel.tp_size", "tp_size": "parallel.tp_size", "distributed_config": "parallel.tp_size",
}  # fmt: skip


def run(config: Config, rank: int, socket: Path, spec: str) -> None:
    """Make the configured model resident. Raises ConfigError, LoaderError."""
    arguments = _arguments(config, rank)
    chosen = class_of(arguments.pop("auto_class", "AutoModelForCausalLM"))
    asked = where(
        config.model or "",
        rank,
        socket_dir=None,
        path=socket,
        name="loader",
        device=None,
        connect_timeout_s=config.timeouts.connect_s,
        state_timeout_s=config.timeouts.state_s,
    )
    load = Load(Target(asked, spec=spec), lambda _: asked, config.identity, arguments, fallback=False)
    try:
        with _group(config, rank, socket.parent), _progress(load):
            load.run(lambda: chosen.from_pretrained(config.model, **arguments))
    except AlreadyResident:
        log.info("already resident: nothing to read")
        return
    except Miss as e:
        raise LoaderError(f"{config.model}: nothing can be published: {e}", hint=e.hint) from e
    if load.held is None:
        why = load.failed
        raise LoaderError(f"{config.model}: nothing was published: {why}", hint=why.hint if why is not None else "")


def _arguments(config: Config, rank: int) -> dict[str, Any]:
    parallel = config.parallel
    if (parallel.pp_size, parallel.dp_size, parallel.ep_size) != (1, 1, 1):
        raise ConfigError(
            'loader = "transformers" shards by tensor parallelism only: pp_size, dp_size and ep_size must be 1',
            hint='loader = "safetensors" shards by plan, loader = "vllm" as vLLM does',
        )
    if 0 < config.load_slots < len(config.ranks):
        raise ConfigError(f"load_slots {config.load_slots}: the {len(config.ranks)} ranks of a model load together")
    for key, ours in _TAKEN.items():
        if key in config.engine_args:
            raise ConfigError(f"engine_args.{key} is decided by {ours}; remove it")
    device = device_of(config, rank)
    decided: dict[str, Any] = {
        "dtype": config.dtype,
        "revision": config.revision,
        "device_map": None if device == CPU or parallel.tp_size > 1 else {"": torch_device(device)},
        "distributed_config": _distributed(parallel.tp_size) if parallel.tp_size > 1 else None,
    }
    return {**{k: v for k, v in decided.items() if v is not None}, **config.engine_args}


def _distributed(tp_size: int) -> Any:
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as e:
        raise ConfigError('loader = "transformers" with tp_size > 1 needs Transformers 5.17 or newer') from e
    return DistributedConfig(tp_size=tp_size, tp_plan="auto")


@contextmanager
def _group(config: Config, rank: int, directory: Path) -> Iterator[None]:
    """While it lasts, this process and the loaders of the other ranks are a group of torch.distributed."""
    size = config.parallel.tp_size
    if size == 1:
        yield
        return
    from torch import distributed

    device = torch_device(device_of(config, rank))
    # Whoever waits makes no progress, and a loader without progress is ended: give up first, and say for whom.
    address = meet(directory, rank, 0, size, 1.5 * config.timeouts.stall_s)
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # Transformers' name for the GPU to use
    distributed.init_process_group(
        "gloo" if device.type == CPU else "nccl",
        init_method=address,
        rank=rank,
        world_size=size,
        device_id=None if device.type == CPU else device,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def _progress(load: Load) -> Iterator[None]:
    """While it lasts, the rank learns how many of the tensors Transformers has loaded."""
    from transformers.utils import logging as transformers_logging

    publications: list[Publication] = []
    load.on_publication = publications.append

    def hook(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = make(*args, **{**kwargs, "disable": True})
        if not publications or not args or not hasattr(args[0], "__len__"):
            return made
        return _Told(made, len(args[0]), publications[0])

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _Told:
    """An iterable that tells the rank how far it is."""

    def __init__(self, items: Any, total: int, publication: Publication) -> None:
        self._items = items
        self._total = total
        self._publication = publication

    def __iter__(self) -> Iterator[Any]:
        told = 0.0
        for done, item in enumerate(self._items):
            now = time.monotonic()
            if now - told >= REPORT_EVERY_S:
                told = now
                self._publication.progress(ProgressInfo(phase="load", files_done=done, files_total=self._total))
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)
