# SPDX-License-Identifier: Apache-2.0
"""The preload of `loader = "transformers"`: Transformers' own loading in a child, published, then gone.

Runs in the loader child that a daemon starts. `engine_args` of wcache.toml are arguments of from_pretrained, and
`auto_class`; an engine with the same arguments asks for exactly what is published here. One device per rank.
"""

from __future__ import annotations

import logging
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
from wcache.engine.tensors import torch_device
from wcache.engine.transformers.load import AlreadyResident, Load, class_of
from wcache.errors import ConfigError, LoaderError
from wcache.model import CPU
from wcache.protocol.messages import ProgressInfo

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.25
# Decided by other keys of wcache.toml.
_TAKEN = {"dtype": "dtype", "torch_dtype": "dtype", "revision": "revision", "device_map": "devices"}


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
    load = Load(Target(asked, spec=spec), config.identity, arguments, fallback=True)
    try:
        with _progress(load):
            load.run(lambda: chosen.from_pretrained(config.model, **arguments))
    except AlreadyResident:
        log.info("already resident: nothing to read")
        return
    if load.held is None:
        why = load.failed or load.miss
        raise LoaderError(f"{config.model}: nothing was published: {why}", hint=why.hint if why is not None else "")


def _arguments(config: Config, rank: int) -> dict[str, Any]:
    if config.parallel.sizes.world > 1:
        raise ConfigError(
            'loader = "transformers" loads whole models: parallel sizes other than 1 are not supported',
            hint='loader = "safetensors" shards by plan, loader = "vllm" as vLLM does',
        )
    for key, ours in _TAKEN.items():
        if key in config.engine_args:
            raise ConfigError(f"engine_args.{key} is decided by {ours}; remove it")
    device = device_of(config, rank)
    decided: dict[str, Any] = {
        "dtype": config.dtype,
        "revision": config.revision,
        "device_map": None if device == CPU else {"": torch_device(device)},
    }
    return {**{k: v for k, v in decided.items() if v is not None}, **config.engine_args}


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
