# SPDX-License-Identifier: Apache-2.0
"""What an engine asks its rank for: the identity of the checkpoint that vLLM would read, and the layout key.

Runs in the engine and in the preload. An unchanged checkpoint is recognised without opening one of its files; one that
is not known is hashed once, whichever ranks and engines ask for it at the same time.
`unchanged` must hold again after a load from disk: only then are the bytes in memory those that were identified.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wcache import config
from wcache.engine.group import words
from wcache.engine.vllm import support
from wcache.engine.vllm.group import Group
from wcache.engine.vllm.layout import Place, here, layout_key
from wcache.errors import Miss, WcacheError
from wcache.model import CPU, IdentityPolicy, MissReason
from wcache.protocol.messages import Query
from wcache.weights.checkpoint import Survey, survey
from wcache.weights.identity import identify, open_store, recognise, stamps_id

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's question. `seconds`: what it took to know the checkpoint."""

    query: Query
    survey: Survey
    place: Place
    rank: int
    device: str
    seconds: float

    def unchanged(self) -> bool:
        """Whether the checkpoint's files are still those that were surveyed."""
        try:
            now = survey(self.survey.directory)
            return (now.files, now.config_digests) == (self.survey.files, self.survey.config_digests)
        except WcacheError:
            return False


def prepare(
    vllm_config: Any, model_config: Any, policy: IdentityPolicy, group: Group, progress: Progress | None = None
) -> Request | WcacheError:
    """What this rank asks for, or why the whole engine asks for nothing. Collective: every rank calls it.

    `progress`: called with bytes done and in total while files are hashed; ranks of a host share that work.
    """
    return _agree(_prepare(vllm_config, model_config, policy, progress), group)


def _prepare(
    vllm_config: Any, model_config: Any, policy: IdentityPolicy, progress: Progress | None
) -> Request | WcacheError:
    start = time.perf_counter()
    try:
        support.check(vllm_config, model_config)
        place = here(vllm_config)
        directory = checkpoint_directory(vllm_config, model_config)
        layout = layout_key(vllm_config, model_config, place, directory)
        found = survey(directory)
        content = _content(found, policy, progress)
    except WcacheError as e:
        return e
    except Exception as e:  # a vLLM unlike the known ones still loads from disk
        log.debug("wcache: no request can be made", exc_info=True)
        return Miss(MissReason.UNSUPPORTED, f"this vLLM cannot be asked about its layout: {type(e).__name__}: {e}")
    query = Query(layout=layout, model=str(model_config.model), content=content, source=stamps_id(found), policy=policy)
    rank = place.global_rank(vllm_config.parallel_config)
    return Request(query, found, place, rank, device_name(), time.perf_counter() - start)


def _content(found: Survey, policy: IdentityPolicy, progress: Progress | None) -> str | None:
    scope = config.default_scope()
    with open_store(config.state_dir_of(config.load_or_default(scope), scope)) as store:
        known = recognise(found, store, policy)
        if known.content is None and policy is not IdentityPolicy.TRUST:
            log.info("wcache: %s is not known yet, hashing %d files once", found.directory, len(known.unknown))
            known = identify(found, store, policy, progress=progress)
        return known.content


def _agree(mine: Request | WcacheError, group: Group) -> Request | WcacheError:
    """All ranks have a question about the same bytes, or nobody asks."""
    content = mine.query.content if isinstance(mine, Request) else None
    everyone = group.gather([int(isinstance(mine, Request)), *words(content)])
    for rank, (ready, *_) in enumerate(everyone):
        if not ready and isinstance(mine, Request):
            return Miss(MissReason.UNSUPPORTED, f"rank {rank} of this engine cannot use the cache; its log says why")
    if isinstance(mine, Request) and any(said != everyone[0] for said in everyone):
        return Miss(MissReason.CONTENT, "the ranks of this engine see different checkpoints under the same name")
    return mine


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
