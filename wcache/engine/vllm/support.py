# SPDX-License-Identifier: Apache-2.0
"""What is left alone, and why: features of vLLM that write into weights or move them, and models beside the target.

Runs in the engine before anything is asked of a rank. Each refusal becomes a typed miss; never a wrong tensor.
"""

from __future__ import annotations

from typing import Any

from wcache.errors import Miss
from wcache.model import MissReason


def check(vllm_config: Any, model_config: Any) -> None:
    """Raises Miss(unsupported) that says what stands in the way."""
    for applies, why in _refusals(vllm_config, model_config):
        if applies:
            raise Miss(MissReason.UNSUPPORTED, why)


def _refusals(vllm_config: Any, model_config: Any) -> list[tuple[bool, str]]:
    parallel, load = vllm_config.parallel_config, vllm_config.load_config
    offload = getattr(vllm_config, "offload_config", None)
    uva, prefetch = getattr(offload, "uva", None), getattr(offload, "prefetch", None)
    return [
        (is_draft(vllm_config, model_config), "draft models are not shared yet"),
        (model_config is not vllm_config.model_config, "only the engine's main model is shared"),
        (bool(getattr(model_config, "enable_sleep_mode", False)), "sleep mode moves the weights"),
        (bool(getattr(model_config, "enable_cumem_allocator", False)), "the cumem allocator owns the weights"),
        (bool(getattr(parallel, "enable_eplb", False)), "EPLB rearranges experts in place"),
        (bool(getattr(parallel, "enable_elastic_ep", False)), "elastic EP moves experts"),
        (getattr(vllm_config, "weight_transfer_config", None) is not None, "weight transfer writes into the weights"),
        (vllm_config.lora_config is not None, "LoRA wraps the layers"),
        (bool(getattr(uva, "cpu_offload_gb", 0)), "CPU offloading moves the weights"),
        (bool(getattr(prefetch, "offload_group_size", 0)), "weight prefetching moves the weights"),
        (model_config.quantization == "torchao", "torchao weights are tensor subclasses"),
        (_online_quantization(vllm_config), "online quantization makes weights while loading"),
        (_other_device(vllm_config, load), "the weights go to another device than the engine's"),
    ]


def is_draft(vllm_config: Any, model_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and model_config is speculative.draft_model_config


def _online_quantization(vllm_config: Any) -> bool:
    home = type(vllm_config.quant_config).__module__
    inner = getattr(vllm_config.quant_config, "online_quantization_config", None)
    return ".quantization.online" in home or ".quantization.online" in type(inner).__module__


def _other_device(vllm_config: Any, load: Any) -> bool:
    asked = getattr(load, "device", None)
    return asked is not None and str(asked).partition(":")[0] != str(vllm_config.device_config.device).partition(":")[0]
