# SPDX-License-Identifier: Apache-2.0
"""The preload of `loader = "vllm"`: vLLM's own loading and post-processing in a child per rank, published, then gone.

Runs in the loader child that a daemon starts. The configuration of vLLM is built from wcache.toml (`engine_args` are
vLLM's own arguments) and keyed by the same function that an engine uses, so what is published here is what an engine
with the same arguments asks for. All ranks of a model load together, because vLLM's layers need their process groups.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from wcache.config import Config, default_scope, runtime_dir
from wcache.engine.vllm.rendezvous import meet
from wcache.errors import ConfigError

log = logging.getLogger(__name__)

# Decided by other keys of wcache.toml.
_TAKEN = {
    "model": "model", "revision": "revision", "dtype": "dtype", "load_format": "loader",
    "tensor_parallel_size": "parallel.tp_size", "pipeline_parallel_size": "parallel.pp_size",
    "data_parallel_size": "parallel.dp_size", "enable_expert_parallel": "parallel.ep_size",
}  # fmt: skip


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


def form_group(vllm_config: Any, config: Config, rank: int, device: torch.device) -> None:
    """Initialise vLLM's process groups among the loader children of the ranks that load together."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel, placement = vllm_config.parallel_config, config.placement(rank)
    replica = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    size = replica * parallel.data_parallel_size
    first = 0 if parallel.data_parallel_size > 1 else placement.dp_rank * replica
    directory = Path(config.socket_dir) if config.socket_dir else runtime_dir(default_scope())
    address = meet(directory, rank, first, size)
    os.environ["VLLM_DIST_IDENT"] = address.rpartition(":")[2]  # names the CPU workers' shared memory
    # Outside vLLM's configuration context: there it would take the engine's own address for data parallel groups.
    init_distributed_environment(size, rank - first, address, device.index or 0, current_platform.dist_backend)
    with set_current_vllm_config(vllm_config):
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    init_workspace_manager(device)
