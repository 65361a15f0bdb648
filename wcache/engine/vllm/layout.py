# SPDX-License-Identifier: Apache-2.0
"""The layout key of a vLLM engine: everything besides the checkpoint that decides what its processed weights look like.

One function over vLLM's own configuration, called by the engine and by the preload of `loader = "vllm"`, so that what
one publishes and the other asks for agree by construction. It must run before the weights are loaded, because
post-processing may change the configuration. Sizes that do not matter are normalised: data parallel replicas of a model
without experts are the same shard.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from wcache.engine.plain import plain as plain
from wcache.engine.vllm import census, drafts
from wcache.engine.vllm.beside import digests_in
from wcache.weights.fingerprint import LayoutKey, digest

ENGINE = "vllm"

# Set differently by a unit, a shell and vLLM itself, and of no consequence for the weights. vLLM's own list of such
# variables (`envs.compile_factors`) comes on top.
_IRRELEVANT = frozenset({
    "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_CONFIGURE_LOGGING", "VLLM_CPU_CI_ENV",
    "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CUDAGRAPH_DUMP_PATH",
    "VLLM_CUSTOM_ALLREDUCE_ALGO", "VLLM_CUSTOM_SCOPES_FOR_PROFILING", "VLLM_DISABLE_COMPILE_CACHE", "VLLM_DIST_IDENT",
    "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_GC_DEBUG", "VLLM_LOG_MODEL_INSPECTION",
    "VLLM_LOOPBACK_IP", "VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_MAIN_CUDA_VERSION",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "VLLM_MM_INPUT_CACHE_GIB", "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    "VLLM_MQ_MAX_CHUNK_BYTES_MB", "VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "VLLM_NCCL_SO_PATH",
    "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_NO_DEPRECATION_WARNING", "VLLM_NVTX_SCOPES_FOR_PROFILING",
    "VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "VLLM_PLUGINS", "VLLM_RAY_DP_PACK_STRATEGY", "VLLM_RPC_TIMEOUT",
    "VLLM_SKIP_P2P_CHECK", "VLLM_SLEEP_WHEN_IDLE", "VLLM_SYSTEM_START_DATE", "VLLM_TARGET_DEVICE",
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS", "VLLM_TORCH_PROFILER_DIR", "VLLM_TRACE_FUNCTION", "VLLM_USAGE_SOURCE",
    "VLLM_USE_AOT_COMPILE", "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_PRECOMPILED",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT", "VLLM_XGRAMMAR_CACHE_MB",
})  # fmt: skip
# On vLLM's list for its compile cache, but these decide how weights are packed.
_RELEVANT = frozenset({"VLLM_CPU_MOE_PREPACK", "VLLM_ZENTORCH_WEIGHT_PREPACK"})

_TOWERS = ("language_model_only", "enable_mm_embeds", "mm_encoder_only", "mm_encoder_tp_mode",
           "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
           "mm_device_do_normalize")  # fmt: skip
_POOLING = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "*token*.json", "vocab*",
            "merges.txt", "*.model", "*.pt")  # fmt: skip

_ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_dim",
         "rope_local_base_freq", "original_max_position_embeddings", "max_position_embeddings")  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands: ranks inside its tensor, pipeline and data parallel groups."""

    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0

    def global_rank(self, parallel: Any) -> int:
        """The rank whose socket is asked: tp varies fastest, then pp, then dp, as in wcache.toml."""
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        return int(self.tp_rank + tp * (self.pp_rank + pp * self.dp_rank))


def here(vllm_config: Any) -> Place:
    """The place of a worker whose process groups are initialised."""
    from vllm.distributed import get_pp_group, get_tp_group

    dp_rank = int(
        getattr(vllm_config.parallel_config, "data_parallel_index", vllm_config.parallel_config.data_parallel_rank)
    )
    return Place(get_tp_group().rank_in_group, get_pp_group().rank_in_group, dp_rank)


def layout_key(vllm_config: Any, model_config: Any, place: Place, directory: Path | None = None) -> LayoutKey:
    """The key of one rank's shard of `model_config`, the main model or its draft.

    `vllm_config`: the engine's own. `directory`: the checkpoint's, if that is not the model's name.
    Raises FingerprintError for what has no canonical form.
    """
    import vllm
    from vllm.model_executor.model_loader.utils import get_model_architecture

    parallel, hf = vllm_config.parallel_config, model_config.hf_text_config
    model_class, architecture = get_model_architecture(model_config)
    dp_size, dp_rank, ep_size, ep_rank = experts(model_config, parallel, place)
    return LayoutKey(
        engine=ENGINE,
        engine_version=vllm.__version__,
        architecture=architecture,
        dtype=str(model_config.dtype).removeprefix("torch."),
        tp_size=parallel.tensor_parallel_size,
        tp_rank=place.tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=place.pp_rank,
        dp_size=dp_size,
        dp_rank=dp_rank,
        ep_size=ep_size,
        ep_rank=ep_rank,
        role="draft" if drafts.is_draft(vllm_config, model_config) else "target",
        quantization=_quantization(vllm_config, model_config),
        rope={k: plain(getattr(hf, k), f"rope.{k}") for k in _ROPE if getattr(hf, k, None) is not None} or None,
        max_model_len=model_config.max_model_len,
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        revision=None,  # the content says which version it is; a branch's name does not
        kernel_backends=_backends(vllm_config),
        device_capability=_capability(),
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda or getattr(torch.version, "hip", None),
        environment=environment(),
        extra=_extra(vllm_config, model_config, model_class, directory or Path(model_config.model)),
    )


def has_experts(model_config: Any) -> bool:
    return bool(model_config.is_moe if hasattr(model_config, "is_moe") else model_config.get_num_experts() > 0)


def experts(model_config: Any, parallel: Any, place: Place) -> tuple[int, int, int, int]:
    """dp size and rank, ep size and rank, as far as they decide a shard: not at all without experts."""
    if not has_experts(model_config):
        return 1, 0, 1, 0
    dp_size, tp_size = parallel.data_parallel_size, parallel.tensor_parallel_size
    if not parallel.enable_expert_parallel:
        return dp_size, place.dp_rank, 1, 0
    return dp_size, place.dp_rank, dp_size * tp_size, place.dp_rank * tp_size + place.tp_rank


def _quantization(vllm_config: Any, model_config: Any) -> dict[str, Any] | None:
    if drafts.quantization_of(vllm_config, model_config) is None and model_config.quantization is None:
        return None
    checkpoint: Any = getattr(model_config.hf_config, "quantization_config", None)
    if hasattr(checkpoint, "to_dict"):
        checkpoint = checkpoint.to_dict()
    return {
        "method": model_config.quantization,
        "checkpoint": plain(checkpoint, "quantization.checkpoint"),
        "runtime": plain(getattr(model_config, "quantization_config", None), "quantization.runtime"),
    }


def _backends(vllm_config: Any) -> dict[str, Any]:
    """What vLLM was told to use. What it chose layer by layer is in the manifest and compared when binding."""
    parallel = vllm_config.parallel_config
    found = {
        "attention": _fields(vllm_config, "attention_config", "backend", "flash_attn_version", "mla_prefill_backend"),
        "kernel": _fields(vllm_config, "kernel_config", "moe_backend", "linear_backend", "linear_backend_per_quant"),
        "all2all": plain(getattr(parallel, "all2all_backend", None), "kernel_backends.all2all"),
    }
    return {k: v for k, v in found.items() if v is not None}


def _extra(vllm_config: Any, model_config: Any, model_class: type, directory: Path) -> dict[str, Any]:
    parallel = vllm_config.parallel_config
    found = {
        "form": census.FORM,
        "model_class": f"{model_class.__module__}.{model_class.__qualname__}",
        "hf_overrides": _hf_overrides(vllm_config, model_config),
        "runner": str(getattr(model_config, "runner_type", "")),
        "convert": str(getattr(model_config, "convert_type", "")),
        "model_impl": str(getattr(model_config, "model_impl", "")),
        "additional_config": plain(getattr(vllm_config, "additional_config", None), "extra.additional_config"),
        "context_parallel": [getattr(parallel, f"{p}_context_parallel_size", 1) for p in ("prefill", "decode")],
        "expert_placement": getattr(parallel, "expert_placement_strategy", None),
        "remote_code": _remote_code(model_config),
        "device": getattr(vllm_config.load_config, "device", None),
        "lora": _lora(vllm_config, model_config),
        "draft": drafts.facts(vllm_config, model_config),
        "multimodal": _multimodal(model_config),
        "pooling": _pooling(model_config, directory),
    }
    return {k: v for k, v in found.items() if v not in (None, {}, "", [1, 1])}


def _multimodal(model_config: Any) -> dict[str, Any] | None:
    """Which towers are left out, and how the others are split and computed."""
    config = getattr(model_config, "multimodal_config", None)
    if config is None:
        return None
    found = {name: str(v) for name in _TOWERS if (v := getattr(config, name, None)) not in (None, False)}
    limits = getattr(config, "limit_per_prompt", {})
    return {**found, "off": sorted(kind for kind in limits if config.get_limit_per_prompt(kind) == 0)}


def _pooling(model_config: Any, directory: Path) -> dict[str, str] | None:
    """Digests of what a pooling model is made of besides its checkpoint files: layers that Sentence Transformers keeps
    in folders of their own, heads beside the checkpoint, and the tokenizer that says which rows become a head."""
    if str(getattr(model_config, "runner_type", "")) != "pooling" or not directory.is_dir():
        return None
    files = {f for pattern in _POOLING for f in directory.glob(pattern)}
    for folder in _folders(directory / "modules.json"):
        files |= set((directory / folder).iterdir()) if folder and (directory / folder).is_dir() else set()
    return digests_in(directory, files)


def _folders(modules: Path) -> list[str]:
    if not modules.is_file():
        return []
    said = json.loads(modules.read_bytes())
    listed = said.get("modules", []) if isinstance(said, dict) else said
    return [str(m.get("path", "")) for m in listed]


def _lora(vllm_config: Any, model_config: Any) -> bool | None:
    """Whether LoRA is on, where that decides more than what is wrapped around the layers afterwards.

    Experts then get other kernels, and towers beside the language model other layers.
    """
    if vllm_config.lora_config is None:
        return None
    return True if has_experts(model_config) or model_config.is_multimodal_model else None


def _hf_overrides(vllm_config: Any, model_config: Any) -> Any:
    """What a user overrides. A draft's configuration is made by a function of vLLM's own, which its method decides."""
    if drafts.is_draft(vllm_config, model_config) and callable(model_config.hf_overrides):
        return None
    return plain(model_config.hf_overrides, "extra.hf_overrides")


def _remote_code(model_config: Any) -> str | None:
    """Digest of the checkpoint's own Python files, which decide the model if vLLM may run them."""
    directory = Path(model_config.model)
    if not model_config.trust_remote_code or not directory.is_dir():
        return None
    sources = {f.name: f.read_text(errors="surrogateescape") for f in sorted(directory.glob("*.py"))}
    return digest({k: v.encode(errors="surrogateescape").hex() for k, v in sources.items()}) if sources else None


def _capability() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    capability = current_platform.get_device_capability()
    return f"{current_platform.device_name} {capability.as_version_str() if capability else ''}".strip()


def environment() -> dict[str, str] | None:
    """VLLM_* variables that are set and may decide how weights are laid out."""
    from vllm import envs

    factors: dict[str, Any] = getattr(envs, "compile_factors", dict)()
    known = getattr(envs, "environment_variables", {})
    found = {}
    for name, value in sorted(os.environ.items()):
        if not name.startswith("VLLM_") or name in _IRRELEVANT:
            continue
        if name in factors or name in _RELEVANT or name not in known:
            found[name] = value
    return found or None


def _fields(vllm_config: Any, section: str, *names: str) -> dict[str, Any] | None:
    config = getattr(vllm_config, section, None)
    found = {n: plain(getattr(config, n, None), f"kernel_backends.{n}") for n in names}
    return {k: v for k, v in found.items() if v is not None} or None
