# SPDX-License-Identifier: Apache-2.0
"""What is left alone, and why: features of vLLM that write into weights or move them, and drafts that are not known.

Runs in the engine before anything is asked of a rank. Each refusal becomes a typed miss; never a wrong tensor.

Sleep mode stays with vLLM's own load. Its seam (`SleepModeBackendFactory.register_backend`, the same in 0.32 and 0.33)
makes a backend without arguments and tells it a level or tags: neither model nor loader, so a backend could find what
to unmap only through global state. Unmapping would free nothing either, because the rank keeps the weights; and level 2
lets vLLM drop what it allocated while loading, bare tensors among it, and counts on a reload into the parameters.
"""

from __future__ import annotations

from typing import Any

from wcache.engine.vllm import drafts
from wcache.errors import Miss
from wcache.model import MissReason


def check(vllm_config: Any, model_config: Any) -> None:
    """Raises Miss(unsupported) that says what stands in the way."""
    why = alone(vllm_config, model_config)
    if why is not None:
        raise why
    for applies, text in _refusals(vllm_config, model_config):
        if applies:
            raise Miss(MissReason.UNSUPPORTED, text)


def alone(vllm_config: Any, model_config: Any) -> Miss | None:
    """Why a draft must not even be asked for: not every worker of the engine would come and ask."""
    if drafts.is_draft(vllm_config, model_config) and vllm_config.parallel_config.pipeline_parallel_size > 1:
        return Miss(MissReason.UNSUPPORTED, "a draft beside a pipeline is loaded by its last stage alone")
    return None


def _refusals(vllm_config: Any, model_config: Any) -> list[tuple[bool, str]]:
    parallel, load, main = vllm_config.parallel_config, vllm_config.load_config, vllm_config.model_config
    offload = getattr(vllm_config, "offload_config", None)
    uva, prefetch = getattr(offload, "uva", None), getattr(offload, "prefetch", None)
    draft = drafts.is_draft(vllm_config, model_config)
    method = vllm_config.speculative_config.method if draft else ""
    return [
        (not draft and model_config is not main, "only the engine's main model and its draft are shared"),
        (draft and method not in drafts.SHARED, f"drafts of the method {method} have not been tried"),
        (bool(getattr(main, "enable_sleep_mode", False)), "sleep mode moves the weights"),
        (bool(getattr(main, "enable_cumem_allocator", False)), "the cumem allocator owns the weights"),
        (bool(getattr(parallel, "enable_eplb", False)), "EPLB rearranges experts in place"),
        (bool(getattr(parallel, "enable_elastic_ep", False)), "elastic EP moves experts"),
        (getattr(vllm_config, "weight_transfer_config", None) is not None, "weight transfer writes into the weights"),
        (bool(getattr(uva, "cpu_offload_gb", 0)), "CPU offloading moves the weights"),
        (bool(getattr(prefetch, "offload_group_size", 0)), "weight prefetching moves the weights"),
        (model_config.quantization == "torchao", "torchao weights are tensor subclasses"),
        (_online_quantization(drafts.quantization_of(vllm_config, model_config)), _ONLINE),
        (_other_device(vllm_config, load), "the weights go to another device than the engine's"),
    ]


_ONLINE = "online quantization makes weights while loading"


def _online_quantization(quantization: Any) -> bool:
    home = type(quantization).__module__
    inner = getattr(quantization, "online_quantization_config", None)
    return ".quantization.online" in home or ".quantization.online" in type(inner).__module__


def _other_device(vllm_config: Any, load: Any) -> bool:
    asked = getattr(load, "device", None)
    return asked is not None and str(asked).partition(":")[0] != str(vllm_config.device_config.device).partition(":")[0]
