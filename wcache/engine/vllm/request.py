# SPDX-License-Identifier: Apache-2.0
"""What an engine asks its rank for: the identity of the checkpoint that vLLM would read, and the layout key.

Runs in the engine and in the preload. An unchanged checkpoint is recognised without opening one of its files.
`check_unchanged` must hold again after a load from disk: only then are the bytes in memory those that were identified.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wcache.engine import together
from wcache.engine.options import host_store
from wcache.engine.vllm import support
from wcache.engine.vllm.group import Group
from wcache.engine.vllm.layout import here, layout_key
from wcache.errors import Miss, WcacheError
from wcache.model import CPU, IdentityPolicy, MissReason
from wcache.protocol.messages import Query
from wcache.weights.checkpoint import survey
from wcache.weights.identity import recognise, stamps_id

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request(together.Request):
    """One rank's question. `seconds`: what it took to make it."""

    rank: int
    seconds: float


def prepare(vllm_config: Any, model_config: Any, policy: IdentityPolicy, group: Group) -> Request:
    """What this rank asks for. Raises WcacheError on every rank if one of them cannot ask. Collective."""
    return together.on_all(lambda: _prepare(vllm_config, model_config, policy), group)


def _prepare(vllm_config: Any, model_config: Any, policy: IdentityPolicy) -> Request:
    start = time.perf_counter()
    try:
        support.check(vllm_config, model_config)
        place = here(vllm_config)
        directory = checkpoint_directory(vllm_config, model_config)
        layout = layout_key(vllm_config, model_config, place, directory)
        found = survey(directory)
        with host_store() as store:
            content = recognise(found, store, policy).content
        model, rank = str(model_config.model), place.global_rank(vllm_config.parallel_config)
        query = Query(layout=layout, model=model, content=content, source=stamps_id(found), policy=policy)
        return Request(query, found, device_name(), rank, time.perf_counter() - start)
    except WcacheError:
        raise
    except Exception as e:  # a vLLM unlike the known ones still loads from disk
        log.debug("wcache: no request can be made", exc_info=True)
        raise Miss(
            MissReason.UNSUPPORTED, f"this vLLM cannot be asked about its layout: {type(e).__name__}: {e}"
        ) from e


def checkpoint_directory(vllm_config: Any, model_config: Any) -> Path:
    """Where vLLM reads the checkpoint, downloaded first if need be. Raises Miss for formats that are not covered."""
    directory = Path(getattr(model_config, "model_weights", "") or model_config.model)
    if not directory.is_dir():
        directory = _downloaded(vllm_config.load_config, model_config)
    if any(directory.glob("consolidated*.safetensors")):
        raise Miss(MissReason.UNSUPPORTED, f"{directory}: vLLM would read the consolidated files (Mistral's format)")
    return directory


def _downloaded(load_config: Any, model_config: Any) -> Path:
    from huggingface_hub import try_to_load_from_cache

    from wcache.engine.vllm.disk import DiskLoader

    DiskLoader(load_config).download_model(model_config)
    found = try_to_load_from_cache(
        model_config.model, "config.json", cache_dir=load_config.download_dir, revision=model_config.revision
    )
    if not isinstance(found, str):
        raise Miss(MissReason.UNSUPPORTED, f"{model_config.model} is no local directory and not in the hub's cache")
    return Path(found).parent


def device_name() -> str:
    """ "cpu", or the UUID of this worker's GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return CPU
    import torch

    from wcache.engine.tensors import gpu_uuid

    return gpu_uuid(torch.cuda.current_device())
