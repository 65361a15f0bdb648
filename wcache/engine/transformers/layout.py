# SPDX-License-Identifier: Apache-2.0
"""The layout key of a Transformers model: everything besides the checkpoint that decides what its tensors look like.

Made from what Transformers itself has resolved by the time the skeleton stands: class, configuration with overrides,
dtype, quantizer, device. The attention implementation decides no tensor and is left out; if it ever changes the
skeleton, `structure` (digest of every module, name, shape and dtype) tells. Called by engines and by the preload.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from wcache.engine import snapshot, values
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
# Maps with thousands of entries in some models: a digest stands for them.
_LABELS = frozenset({"id2label", "label2id"})
# Whose version is in the key already, or that makes no model.
_KNOWN_CODE = frozenset({"transformers", "torch", "wcache"}) | sys.stdlib_module_names - {"__main__"}
# Of a conversion from checkpoint to model: what follows from its patterns, and what only a load under way puts there.
_OF_A_LOAD = frozenset({
    "compiled_sources", "collected_tensors", "layer_targets", "distributed_operation", "_was_used", "_active",
})  # fmt: skip


def layout_key(
    model: Any, load_config: Any, before: Skeleton, arguments: Mapping[str, Any], device: torch.device, group: Group
) -> LayoutKey:
    """Raises Miss(unsupported), FingerprintError for what has no canonical form."""
    import transformers

    config = _settings(plain(model.config.to_dict(), "extra.config"))
    conversions = getattr(load_config, "weight_mapping", None) or []
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
            "class": values.type_name(type(model)),
            "code": _code(model, conversions),
            "config": config,
            "conversions": _described(conversions, "extra.conversions"),
            "dtype_plan": plain(getattr(load_config, "dtype_plan", None), "extra.dtype_plan") or None,
            "arguments": _arguments(model.config, arguments),
            "structure": before.structure,
        },
    )


def _settings(config: Any) -> Any:
    """A configuration, with those inside it, without what decides no tensor; infinities have no form in JSON."""
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    if isinstance(config, dict):
        return {k: _labels(v) if k in _LABELS else _settings(v) for k, v in config.items() if k not in _NO_LAYOUT}
    return [_settings(v) for v in config] if isinstance(config, list) else config


def _labels(labels: Any) -> Any:
    return {"entries": len(labels), "digest": digest(labels)} if isinstance(labels, dict) else labels


def _arguments(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments that reach the model past its configuration."""
    from transformers import PreTrainedConfig

    # Beside a configuration that is given, nothing goes into the configuration.
    past = isinstance(arguments.get("config"), PreTrainedConfig)
    left = {k: v for k, v in arguments.items() if k not in _SHOWN_ELSEWHERE and (past or not hasattr(config, k))}
    if isinstance(left.get("key_mapping"), Mapping):
        left["key_mapping"] = list(left["key_mapping"].items())  # the first pattern that fits wins
    return plain(left, "extra.arguments") or None


def _described(value: Any, where: str) -> Any:
    """Conversions from checkpoint to model as plain values, in order: class and parameters, operations inside."""
    from transformers import PreTrainedConfig
    from transformers.core_model_loading import ConversionOps, WeightTransform
    from transformers.quantizers import HfQuantizer

    if isinstance(value, ConversionOps | WeightTransform):
        said = {k: _described(v, f"{where}.{k}") for k, v in values.fields(value) if k not in _OF_A_LOAD}
        return [values.type_name(type(value)), said]
    if isinstance(value, HfQuantizer):  # its configuration is in the key
        return values.type_name(type(value))
    if isinstance(value, PreTrainedConfig):
        return _settings(plain(value.to_dict(), where))
    if isinstance(value, type):
        return values.type_name(value)
    if isinstance(value, Mapping):
        return [[_described(k, where), _described(v, f"{where}.{k}")] for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [_described(v, f"{where}[{i}]") for i, v in enumerate(value)]
    return plain(value, where)


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


def _code(model: Any, conversions: Sequence[Any] = ()) -> str | None:
    """Digest of the source of whatever the model is made of that is no part of Transformers, torch or Python.

    Of an installed package, the files that define the classes; of the program's own code, also what these refer to.
    """
    kinds = {kind for part in _parts(model, conversions) for kind in type(part).__mro__}
    own = {kind for kind in kinds if not _known(kind.__module__)}
    files = {file for kind in own for file in _sources(kind)} | _reached({kind.__module__ for kind in own})
    try:
        return digest(sorted([f.name, hashlib.sha256(f.read_bytes()).hexdigest()] for f in files)) if files else None
    except OSError as e:
        raise Miss(MissReason.UNSUPPORTED, f"the source of {type(model).__qualname__} cannot be read: {e}") from e


def _parts(model: Any, conversions: Sequence[Any]) -> Iterator[Any]:
    """Objects whose classes decide: modules, configurations, conversions with their operations."""
    for module in model.modules():
        yield module
        yield vars(module).get("config")
    for conversion in conversions:
        yield conversion
        yield from getattr(conversion, "operations", None) or ()


def _sources(kind: type) -> list[Path]:
    try:
        file = Path(inspect.getfile(kind))
        return list(file.parent.glob("*.py")) if kind.__module__.startswith("transformers_modules.") else [file]
    except (OSError, TypeError) as e:
        raise Miss(MissReason.UNSUPPORTED, f"the source of {kind.__qualname__} cannot be read: {e}") from e


def _reached(names: set[str]) -> set[Path]:
    """Files of those of these modules that are the program's own, and of all its modules that they refer to."""
    files, seen, left = set(), set[str](), set(names)
    while left:
        name = left.pop()
        seen.add(name)
        module = sys.modules.get(name)
        file = vars(module).get("__file__") if isinstance(module, ModuleType) and not _known(name) else None
        if file is not None and not _installed(_root(name, Path(file))):
            if Path(file).exists() or not name.startswith("transformers_modules."):  # a cache: its files may be gone
                files.add(Path(file))
            left |= _referred(module, Path(file)) - seen
    return files


def _referred(module: Any, file: Path) -> set[str]:
    """Names of modules that a module's globals come from, or that it imports anything from, a number for instance."""
    homes = {_home(value) for value in list(vars(module).values())}
    return {name for name in homes if isinstance(name, str)} | set(_imports(vars(module).get("__package__"), file))


def _home(value: Any) -> Any:
    if isinstance(value, ModuleType):
        return value.__name__
    return value.__module__ if isinstance(value, type | FunctionType) else type(value).__module__


def _imports(package: str | None, file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes() if file.suffix == ".py" else b"")
    except (OSError, SyntaxError, ValueError):  # its bytes are all that is known of it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _root(name: str, file: Path) -> Path:
    """The directory that a module's top package was found in."""
    above = list(file.parents)
    return above[min(name.count(".") + (file.stem == "__init__"), len(above) - 1)]


@cache
def _installed(root: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(root.parts) or any(root.glob("*.dist-info"))


def _known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN_CODE
