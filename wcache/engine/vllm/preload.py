# SPDX-License-Identifier: Apache-2.0
"""The preload of `loader = "vllm"`: vLLM's own loading and post-processing in a child per rank, published, then gone.

Runs in the loader child that a daemon starts. The configuration of vLLM is built from wcache.toml (`engine_args` are
vLLM's own arguments) and keyed by the same function that an engine uses, so what is published here is what an engine
with the same arguments asks for. All ranks of a model load together, because vLLM's layers need their process groups.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wcache.config import Config
from wcache.engine import together
from wcache.engine.election import Target, claim
from wcache.engine.loader import Report, device_of
from wcache.engine.options import Where
from wcache.engine.publish import Publication
from wcache.engine.rendezvous import meet
from wcache.engine.tensors import torch_device
from wcache.engine.vllm import drafts, writeback
from wcache.engine.vllm.disk import DiskLoader
from wcache.engine.vllm.group import Group
from wcache.engine.vllm.request import Request, prepare
from wcache.engine.vllm.skeleton import preview
from wcache.errors import ConfigError, PublishError
from wcache.model import BackendName
from wcache.protocol.connection import connect
from wcache.protocol.messages import Progress
from wcache.weights.checkpoint import open_checkpoint

log = logging.getLogger(__name__)

# Decided by other keys of wcache.toml.
_TAKEN = {
    "model": "model", "revision": "revision", "dtype": "dtype", "load_format": "loader",
    "tensor_parallel_size": "parallel.tp_size", "pipeline_parallel_size": "parallel.pp_size",
    "data_parallel_size": "parallel.dp_size", "enable_expert_parallel": "parallel.ep_size",
}  # fmt: skip


def run(config: Config, rank: int, socket: Path, spec: str) -> None:
    """Make the configured rank's shard resident, and its draft's if one is configured. Raises WcacheError."""
    _check(config)
    vllm_config, device = vllm_config_of(config, rank), device_for(config, rank)
    form_group(vllm_config, config, rank, device, socket.parent)
    target = Wanted(config, socket, vllm_config, vllm_config.model_config, vllm_config)
    target.load(spec=spec)
    if drafts.draft_of(vllm_config) is not None:
        _load_draft(config, socket, vllm_config)


def _load_draft(config: Config, socket: Path, vllm_config: Any) -> None:
    """The rank's promise is the target: a draft that cannot be had costs the first engine a load, not the start."""
    try:
        made, prefix = drafts.derived(vllm_config)
        Wanted(config, socket, vllm_config, drafts.draft_of(vllm_config), made, prefix).load()
    except Exception as e:  # whatever vLLM makes of it
        log.debug("the draft failed", exc_info=True)
        log.warning("the draft is not preloaded: %s: %s", type(e).__name__, e)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One model to load. `vllm_config`: the engine's own, of which the key is made; `made`: what it is loaded with."""

    config: Config
    socket: Path
    vllm_config: Any
    model_config: Any
    made: Any
    prefix: str = ""

    def load(self, *, spec: str | None = None) -> None:
        """Load and publish, unless it is resident. Raises WcacheError. Collective. `spec`: the preload's."""
        asked, limits = self._request(), self.config.timeouts
        where = Where(self.socket, "loader", asked.device, limits.connect_s, time.monotonic() + limits.state_s)
        publication = claim(asked.query, Target(where, spec=spec), asked.size, wait_s=where.left_s)
        if publication is None:
            log.info("already resident: nothing to read")
            return
        with writeback.abandoned_on_error(publication):
            self._publish(publication, asked)

    def _request(self) -> Request:
        group = Group.world()
        asked = prepare(self.vllm_config, self.model_config, self.config.identity, group)
        with connect(self.socket, role="loader", name="loader") as connection:
            hashing = Report("identify", lambda info: connection.send(Progress(progress=info)))

            def identified() -> Request:
                return asked.proven(lambda done, total: hashing(bytes_done=done, bytes_total=total))

            return together.on_all(identified, group)

    def _publish(self, publication: Publication, asked: Request) -> None:
        from vllm.config import set_current_vllm_config

        seen = preview(self.made, self.model_config, self.prefix)
        if seen.why is not None:
            raise PublishError(seen.why)
        draft = drafts.is_draft(self.vllm_config, self.model_config)
        how = drafts.load_config_of(self.vllm_config) if draft else self.vllm_config.load_config
        disk, report = DiskLoader(how), Report("load", publication.progress)
        disk.on_bytes = lambda done: report(bytes_done=done, bytes_total=asked.survey.size)
        with set_current_vllm_config(self.vllm_config):
            try:
                model = disk.load_model(vllm_config=self.made, model_config=self.model_config, prefix=self.prefix)
            except Exception:
                open_checkpoint(asked.survey)  # which file is damaged, and how, if that is the cause
                raise
            report.last()
            with drafts.aside(model, self.made, self.model_config):
                attachment = writeback.publish(model, disk, publication, asked, seen)
        log.info("published %d tensors", len(attachment.manifest.tensors))
        attachment.close()


def _check(config: Config) -> None:
    parallel = config.parallel
    if parallel.ep_size not in (1, parallel.tp_size * parallel.dp_size):
        raise ConfigError(f"parallel.ep_size {parallel.ep_size}: vLLM spreads experts over all tp x dp ranks, or none")
    if 0 < config.load_slots < len(config.ranks):
        raise ConfigError(
            f"load_slots {config.load_slots}: the {len(config.ranks)} ranks of a vLLM model load together"
        )


def device_for(config: Config, rank: int) -> torch.device:
    """The rank's device, made this process's current one."""
    if config.backend is BackendName.HOST:
        for name in ("empty_cache", "synchronize"):  # as vLLM's CPU worker does: there is no accelerator to ask
            setattr(torch.accelerator, name, _nothing)
        return torch.device("cpu")
    device = torch_device(device_of(config, rank))
    torch.accelerator.set_device_index(device)
    return device


def _nothing(*_: Any) -> None:
    return None


def vllm_config_of(config: Config, rank: int) -> Any:
    """vLLM's configuration of one rank, from wcache.toml. Raises ConfigError."""
    for key, ours in _TAKEN.items():
        if key in config.engine_args:
            raise ConfigError(f"engine_args.{key} is decided by {ours}; remove it")
    made = _engine_config(config, {})
    # As vLLM's engines do: replicas of a model without experts know nothing of each other.
    if config.parallel.dp_size > 1 and made.model_config.is_moe:
        made = _engine_config(config, {"data_parallel_size": config.parallel.dp_size})
        made.parallel_config.data_parallel_rank = config.placement(rank).dp_rank
        made.parallel_config.data_parallel_rank_local = config.placement(rank).dp_rank
    made.parallel_config.data_parallel_index = config.placement(rank).dp_rank
    return made


def _engine_config(config: Config, more: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    parallel = config.parallel
    ours = {
        "model": config.model,
        "revision": config.revision,
        "dtype": config.dtype,
        "tensor_parallel_size": parallel.tp_size,
        "pipeline_parallel_size": parallel.pp_size,
        "enable_expert_parallel": parallel.ep_size > 1,
        "distributed_executor_backend": "mp" if parallel.sizes.world > 1 else None,
    }
    try:
        return EngineArgs(**{**ours, **more, **config.engine_args}).create_engine_config()
    except TypeError as e:
        raise ConfigError(f"engine_args: {e}") from e


def form_group(vllm_config: Any, config: Config, rank: int, device: torch.device, directory: Path) -> None:
    """Initialise vLLM's process groups among the loader children of the ranks that load together."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel, placement = vllm_config.parallel_config, config.placement(rank)
    replica = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    size = replica * parallel.data_parallel_size
    first = 0 if parallel.data_parallel_size > 1 else placement.dp_rank * replica
    # Whoever waits makes no progress, and a loader without progress is ended: give up first, and say for whom.
    address = meet(directory, rank, first, size, 1.5 * config.timeouts.stall_s)
    os.environ["VLLM_DIST_IDENT"] = address.rpartition(":")[2]  # names the CPU workers' shared memory
    # Outside vLLM's configuration context: there it would take the engine's own address for data parallel groups.
    init_distributed_environment(size, rank - first, address, device.index or 0, current_platform.dist_backend)
    with set_current_vllm_config(vllm_config):
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    init_workspace_manager(device)
