# SPDX-License-Identifier: Apache-2.0
"""vLLM's ways to write into a loaded model's weights, refused where these are shared.

Runs in vLLM's workers. `reload_weights`, the reset of `/weight_checker` and a direct `model.load_weights` write in
place. On a GPU such a write faults and ends the process; on a CPU it would make pages of this engine's own, so that one
engine of several answers with other weights. Refused before anything is touched, with what to do instead.
The methods are vLLM's, and each is wrapped once; a model without shared weights passes through.
Surprising: a reload into private weights must keep them unpacked on a CPU, as the load did.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wcache.engine.vllm.disk import unpacked_linear
from wcache.engine.vllm.plugin import LOAD_FORMAT
from wcache.errors import Miss
from wcache.model import MissReason

ATTACHMENT = "_wcache_attachment"  # where a model keeps its lease

_WORKERS = {
    ("vllm.v1.worker.gpu_worker", "Worker"): ("reload_weights", "reset_weights"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"): ("reload_weights",),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"): ("reload_weights",),
}


def install(model: nn.Module) -> None:
    """Guard this model, and whatever workers vLLM has loaded in this process. Idempotent."""
    _wrap(type(model), "load_weights", lambda it: it)
    for (module, name), methods in _WORKERS.items():
        owner = getattr(sys.modules.get(module), name, None)
        for method in methods:
            if owner is not None:
                _wrap(owner, method, _model_of)


def reload_to(model: nn.Module, device: torch.device) -> None:
    """Where a reload makes its tensors: vLLM noted the device under which the model was built, which had no memory."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # a vLLM that reloads in another way, if at all
        return
    for module in model.modules():
        get_layerwise_info(module).restore_device = device


def refuse(model: Any, what: str) -> None:
    """Raises Miss(unsupported) if the model stands on shared weights."""
    if isinstance(model, nn.Module) and ATTACHMENT in model.__dict__:
        raise Miss(
            MissReason.UNSUPPORTED,
            f"{what}: the weights of this engine are shared and read-only; an engine started with "
            'model_loader_extra_config {"mode": "copy"}, or without the load format wcache, has its own',
        )


def _wrap(owner: type, method: str, model_of: Callable[[Any], Any]) -> None:
    original = getattr(owner, method, None)
    if original is None or hasattr(original, "_wcache_guard"):
        return

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(model_of(self), method)
        config = getattr(getattr(self, "vllm_config", None), "load_config", None)
        if method != "reload_weights" or getattr(config, "load_format", None) != LOAD_FORMAT:
            return original(self, *args, **kwargs)
        with unpacked_linear():
            return original(self, *args, **kwargs)

    guarded._wcache_guard = True  # type: ignore[attr-defined]
    setattr(owner, method, guarded)


def _model_of(worker: Any) -> Any:
    """The model of a worker or of its runner."""
    return getattr(worker, "model_runner", worker).get_model()
