# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's quantization methods can be shared, in which way, and the test that stands behind each.

Imports nothing of vLLM until a model is asked about: `wcache explain --methods` prints the table. `shared`: vLLM itself
declares a pre-processed mode for the method and rebuilds what it needs. `rebuilt`: it does not, but everything that its
post-processing leaves behind is tensors and plain values, which are put back; its post-processing does not run.
`falls back`: a start of such a model loads from disk and says why. A method that is not listed and declares no
pre-processed mode falls back too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

VERSIONS = "0.31, 0.32, 0.33"


class Way(StrEnum):
    SHARED = "shared"
    REBUILT = "rebuilt"
    FALLS_BACK = "falls back"


@dataclass(frozen=True, slots=True)
class Row:
    """`method`, `scheme`, `kernel`: vLLM's class names; empty is any. `test`: below tests/; empty: none has run."""

    what: str
    method: str
    way: Way
    test: str = ""
    scheme: str = ""
    kernel: str = ""
    why: str = ""

    def covers(self, said: Said) -> bool:
        pairs = ((self.method, said.method), (self.scheme, said.scheme), (self.kernel, said.kernel))
        return all(not wanted or wanted == found for wanted, found in pairs)


@dataclass(frozen=True, slots=True)
class Said:
    """What a layer says of itself."""

    method: str
    scheme: str
    kernel: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.method, self.scheme, self.kernel)))


_ENGINES = "vllm/test_engines.py::test_cold_warm_and_copied_engines_are_the_disk_engine"
_CPU = "vllm/test_methods.py::test_parity"
_GPU = "gpu/test_vllm.py::test_parity"
_REFUSED = "vllm/test_methods.py::test_a_method_that_hides_its_weights"
_FEATURES = "vllm/test_features.py"

_COMPRESSED, _AWQ, _GPTQ = "CompressedTensorsLinearMethod", "AutoAWQMarlinLinearMethod", "AutoGPTQLinearMethod"
_FP8, _INT4, _INT8 = "CompressedTensorsW8A8Fp8", "CompressedTensorsWNA16", "CompressedTensorsW8A8Int8"
_CPU_INT4, _MARLIN, _MACHETE = "CPUWNA16LinearKernel", "MarlinLinearKernel", "MacheteLinearKernel"
_CUTLASS = "CutlassFP8ScaledMMLinearKernel"

TABLE = (
    Row("unquantized linear", "UnquantizedLinearMethod", Way.SHARED, f"{_ENGINES}[llama]"),
    Row("unquantized embedding, tied or not", "UnquantizedEmbeddingMethod", Way.SHARED, f"{_ENGINES}[qwen3]"),
    Row("unquantized MoE", "UnquantizedFusedMoEMethod", Way.SHARED, f"{_GPU}[moe]"),
    Row("unquantized MoE, expert parallel", "UnquantizedFusedMoEMethod", Way.SHARED,
        "vllm/test_parallel.py::test_expert_parallel_ranks_hold_their_own_experts"),
    Row("MLA (W_UK, W_UV)", "MLAAttention", Way.REBUILT, f"{_GPU}[mla]"),
    Row("FP8, per tensor", "Fp8LinearMethod", Way.SHARED, f"{_GPU}[fp8]"),
    Row("FP8, in blocks", "Fp8LinearMethod", Way.SHARED, f"{_GPU}[fp8-block]"),
    Row("FP8 MoE", "Fp8MoEMethod", Way.SHARED, f"{_GPU}[moe-fp8]"),
    Row("KV cache scales", "Fp8KVCacheMethod", Way.SHARED, f"{_GPU}[fp8]"),
    Row("KV cache scales of compressed-tensors", "CompressedTensorsKVCacheMethod", Way.REBUILT,
        f"{_GPU}[packed-int4]"),
    Row("compressed-tensors FP8, CUTLASS", _COMPRESSED, Way.REBUILT, f"{_GPU}[fp8-channel]", _FP8, _CUTLASS),
    Row("compressed-tensors FP8, CPU", _COMPRESSED, Way.REBUILT, f"{_CPU}[fp8-channel]", _FP8,
        "ChannelWiseTorchFP8ScaledMMLinearKernel"),
    Row("compressed-tensors int4, Marlin", _COMPRESSED, Way.REBUILT, f"{_GPU}[packed-int4]", _INT4, _MARLIN),
    Row("compressed-tensors int4, Machete", _COMPRESSED, Way.REBUILT, f"{_GPU}[packed-int4-128]", _INT4, _MACHETE),
    Row("compressed-tensors int4, CPU", _COMPRESSED, Way.REBUILT, f"{_CPU}[packed-int4]", _INT4, _CPU_INT4),
    Row("compressed-tensors int8, CUTLASS", _COMPRESSED, Way.REBUILT, f"{_GPU}[int8]", _INT8,
        "CutlassInt8ScaledMMLinearKernel"),
    Row("compressed-tensors int8, CPU", _COMPRESSED, Way.FALLS_BACK, _REFUSED, _INT8, "CPUInt8ScaledMMLinearKernel",
        "a oneDNN handle owns the packed weights"),
    Row("AWQ, Marlin", _AWQ, Way.REBUILT, f"{_GPU}[awq]", kernel=_MARLIN),
    Row("AWQ, Machete", _AWQ, Way.REBUILT, f"{_GPU}[awq-128]", kernel=_MACHETE),
    Row("AWQ, CPU", _AWQ, Way.REBUILT, f"{_CPU}[awq]", kernel=_CPU_INT4),
    Row("GPTQ, Marlin", _GPTQ, Way.REBUILT, f"{_GPU}[gptq]", kernel=_MARLIN),
    Row("GPTQ, Machete", _GPTQ, Way.REBUILT, f"{_GPU}[gptq-128]", kernel=_MACHETE),
    Row("GPTQ, CPU", _GPTQ, Way.REBUILT, f"{_CPU}[gptq]", kernel=_CPU_INT4),
    Row("ModelOpt FP8, CUTLASS", "ModelOptLinearMethod", Way.REBUILT, f"{_GPU}[modelopt-fp8]", kernel=_CUTLASS),
    Row("ModelOpt NVFP4, Marlin", "ModelOptLinearMethod", Way.SHARED, f"{_GPU}[nvfp4]",
        kernel="MarlinNvFp4LinearKernel"),
    Row("MoE of AWQ, GPTQ, compressed-tensors", "", Way.FALLS_BACK, why="its kernels can only be made by loading"),
    Row("torchao", "TorchAOLinearMethod", Way.FALLS_BACK, _FEATURES, why="tensor subclasses"),
    Row("online quantization", "", Way.FALLS_BACK, _FEATURES, why="weights are made while loading"),
)  # fmt: skip
_REBUILT = tuple(row for row in TABLE if row.way is Way.REBUILT)
_REFUSALS = tuple(row for row in TABLE if row.way is Way.FALLS_BACK and row.method)


def said(module: Any) -> Said:
    """The names of a layer's quantization method, of its scheme, and of the kernel that was picked for it."""
    method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
    holder = scheme if scheme is not None else method
    kernel = next((k for n in ("kernel", "fp8_linear") if (k := getattr(holder, n, None)) is not None), None)
    return Said(*(type(x).__name__ if x is not None else "" for x in (method, scheme, kernel)))


def rebuilt(model: Any) -> dict[str, Any]:
    """The modules whose post-processing is put back instead of run again, by name."""
    return {name: m for name, m in model.named_modules() if _method_rebuilt(m) or _hook_rebuilt(m)}


def _method_rebuilt(module: Any) -> bool:
    return getattr(module, "quant_method", None) is not None and any(row.covers(said(module)) for row in _REBUILT)


def _hook_rebuilt(module: Any) -> bool:
    """Layers that process their weights themselves, without a quantization method."""
    return any(row.method == kind.__name__ for row in _REBUILT for kind in type(module).__mro__)


def _declares(method: Any) -> bool | None:
    """Whether a quantization method declares a pre-processed mode; None for what is none."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return bool(method.supports_pre_processed_weights) if isinstance(method, QuantizeMethodBase) else None


def unshareable(model: Any) -> str | None:
    """Why the model's quantization methods forbid sharing its processed weights; None if they allow it."""
    for name, module in model.named_modules():
        if _declares(getattr(module, "quant_method", None)) is False and not _method_rebuilt(module):
            what = said(module)
            known = next((row.why for row in _REFUSALS if row.covers(what)), "vLLM has no pre-processed mode for it")
            return f"{what} of layer {name or '<root>'} cannot be shared: {known}"
    return None


@contextmanager
def not_run(modules: dict[str, Any]) -> Iterator[None]:
    """While it lasts, vLLM's post-processing passes over these modules."""
    methods = [(m, m.quant_method) for m in modules.values() if _method_rebuilt(m)]
    hooks = [m for m in modules.values() if _hook_rebuilt(m)]
    for module, _ in methods:
        module.quant_method = None
    for module in hooks:
        module.process_weights_after_loading = _nothing
    try:
        yield
    finally:
        for module in hooks:
            del module.process_weights_after_loading
        for module, method in methods:
            module.quant_method = method


def _nothing(*_: Any) -> None:
    return None
