# SPDX-License-Identifier: Apache-2.0
"""The layout key of a Transformers model: everything besides the checkpoint that decides what its tensors look like.

Made from what Transformers itself has resolved by the time the skeleton stands: class, configuration with overrides,
dtype, quantizer, device. The attention implementation decides no tensor and is left out; if it ever changes the
skeleton, `structure` (digest of every module, name, shape and dtype) tells. Called by engines and by the preload.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from wcache.engine import snapshot
from wcache.engine.group import Group
from wcache.engine.plain import plain
from wcache.engine.snapshot import Skeleton
from wcache.errors import Miss
from wcache.model import MissReason
from wcache.weights.fingerprint import LayoutKey, digest

ENGINE = "transformers"

# Arguments of from_pretrained that find files, or that the configuration, dtype, device, quantizer or the placement of
# the skeleton's tensors already show.
_SHOWN_ELSEWHERE = frozenset({
    "cache_dir", "code_revision", "config", "device_map", "disable_mmap", "dtype", "force_download", "from_flax",
    "from_tf", "generation_config", "local_files_only", "low_cpu_mem_usage", "max_memory", "mirror", "offload_buffers",
    "offload_folder", "offload_state_dict", "output_loading_info", "proxies", "quantization_config", "revision",
    "subfolder", "token", "torch_dtype", "tqdm_class", "trust_remote_code", "use_auth_token", "use_safetensors",
    "variant", "weights_only", "attn_implementation", "experts_implementation", "adapter_kwargs", "adapter_name",
    "_commit_hash", "_fast_init", "distributed_config", "tp_plan", "tp_size", "device_mesh",
})  # fmt: skip
# Of a configuration: where it came from, and what only running the model asks for.
_NO_LAYOUT = frozenset({
    "_name_or_path", "name_or_path", "transformers_version", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "problem_type", "attn_implementation", "_attn_implementation", "quantization_config", "_commit_hash",
    "distributed_config",
})  # fmt: skip
# Quantizers whose loaded weights are tensors and plain values (see `parts`), and whose post-processing may run again on
# them; with the package that decides what they look like.
_KNOWN_METHODS = {
    "fp8": None, "compressed-tensors": "compressed-tensors", "torchao": "torchao", "bitsandbytes": "bitsandbytes",
}  # fmt: skip
# Whose version is in the key already.
_KNOWN_CODE = frozenset({"transformers", "torch"}) | sys.stdlib_module_names - {"__main__"}


def layout_key(
    model: Any, load_config: Any, before: Skeleton, arguments: Mapping[str, Any], device: torch.device, group: Group
) -> LayoutKey:
    """Raises Miss(unsupported), FingerprintError for what has no canonical form."""
    import transformers

    config = _settings(plain(model.config.to_dict(), "extra.config"))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return LayoutKey(
        engine=ENGINE,
        engine_version=transformers.__version__,
        architecture=type(model).__name__,
        dtype=str(load_config.dtype).removeprefix("torch."),
        tp_size=group.size,
        tp_rank=group.rank,
        quantization=_quantization(load_config.hf_quantizer),
        rope=rope if isinstance(rope, dict) else None,
        kernel_backends=_experts(model.config),
        device_capability=_capability(device),
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda or torch.version.hip,
        extra={
            "form": snapshot.FORM,
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "code": _code(model),
            "config": config,
            "arguments": _arguments(model.config, arguments),
            "structure": before.structure,
        },
    )


def _settings(config: Any) -> Any:
    """A configuration, with those inside it, without what decides no tensor; infinities have no form in JSON."""
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    if isinstance(config, dict):
        return {k: _settings(v) for k, v in config.items() if k not in _NO_LAYOUT}
    return [_settings(v) for v in config] if isinstance(config, list) else config


def _arguments(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments that reach the model past its configuration."""
    from transformers import PreTrainedConfig

    # Beside a configuration that is given, nothing goes into the configuration.
    past = isinstance(arguments.get("config"), PreTrainedConfig)
    left = {k: v for k, v in arguments.items() if k not in _SHOWN_ELSEWHERE and (past or not hasattr(config, k))}
    return plain(left, "extra.arguments") or None


def _quantization(quantizer: Any) -> dict[str, Any] | None:
    if quantizer is None:
        return None
    config = quantizer.quantization_config
    method = str(getattr(config.quant_method, "value", config.quant_method))
    if method not in _KNOWN_METHODS and not getattr(config, "dequantize", False):
        raise Miss(
            MissReason.UNSUPPORTED,
            f"quantization {method} keeps its state in objects beside the tensors, which are not shared",
        )
    return {
        "method": method,
        "version": metadata.version(package) if (package := _KNOWN_METHODS.get(method)) is not None else None,
        "pre_quantized": bool(quantizer.pre_quantized),
        "config": plain(config.to_dict(), "quantization.config"),
    }


def _experts(config: Any) -> dict[str, Any] | None:
    chosen = getattr(config, "_experts_implementation", None)
    return {"experts": plain(chosen, "kernel_backends.experts")} if chosen is not None else None


def _capability(device: torch.device) -> str:
    """Buffers are computed where the model is, and not every processor rounds a cosine the same way."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} {major}.{minor}"
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def _code(model: Any) -> str | None:
    """Digest of the source of whatever the model is made of that is no part of Transformers, torch or Python."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _KNOWN_CODE]
    files = {file for kind in own for file in _sources(kind)}
    return digest(sorted([f.name, f.read_bytes().hex()] for f in files)) if files else None


def _sources(kind: type) -> list[Path]:
    try:
        file = Path(inspect.getfile(kind))
        return list(file.parent.glob("*.py")) if kind.__module__.startswith("transformers_modules.") else [file]
    except (OSError, TypeError) as e:
        raise Miss(MissReason.UNSUPPORTED, f"the source of {kind.__qualname__} cannot be read: {e}") from e
