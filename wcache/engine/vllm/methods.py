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

VERSIONS = "0.32, 0.33"


class Way(StrEnum):
    SHARED = "shared"
    REBUILT = "rebuilt"
    FALLS_BACK = "falls back"


@dataclass(frozen=True, slots=True)
class Row:
    """`method`, `scheme`, `kernel`: vLLM's class names; empty is any. `test`: in tests/vllm; empty: none has run."""

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


_ENGINES = "test_engines.py::test_cold_warm_and_copied_engines_are_the_disk_engine"
_METHODS = "test_methods.py::test_parity"
_REFUSED = "test_methods.py::test_a_method_that_hides_its_weights"
_W4 = "CPUWNA16LinearKernel"

TABLE = (
    Row("unquantized linear", "UnquantizedLinearMethod", Way.SHARED, f"{_ENGINES}[llama]"),
    Row("unquantized embedding, tied or not", "UnquantizedEmbeddingMethod", Way.SHARED, f"{_ENGINES}[qwen3]"),
    Row("unquantized MoE", "UnquantizedFusedMoEMethod", Way.SHARED, f"{_ENGINES}[mixtral]"),
    Row("unquantized MoE, expert parallel", "UnquantizedFusedMoEMethod", Way.SHARED,
        "test_parallel.py::test_expert_parallel_ranks_hold_their_own_experts"),
    Row("MLA (W_UK, W_UV)", "MLAAttention", Way.REBUILT, f"{_METHODS}[mla]"),
    Row("FP8, per tensor", "Fp8LinearMethod", Way.SHARED, f"{_METHODS}[fp8]"),
    Row("FP8 MoE", "Fp8MoEMethod", Way.SHARED, why="no run on a GPU yet; vLLM has no CPU kernel for it"),
    Row("KV cache scales", "Fp8KVCacheMethod", Way.SHARED, f"{_METHODS}[fp8]"),
    Row("KV cache scales of compressed-tensors", "CompressedTensorsKVCacheMethod", Way.REBUILT,
        f"{_METHODS}[packed-int4]"),
    Row("compressed-tensors FP8, CPU", "CompressedTensorsLinearMethod", Way.REBUILT, f"{_METHODS}[fp8-channel]",
        "CompressedTensorsW8A8Fp8", "ChannelWiseTorchFP8ScaledMMLinearKernel"),
    Row("compressed-tensors int4, CPU", "CompressedTensorsLinearMethod", Way.REBUILT, f"{_METHODS}[packed-int4]",
        "CompressedTensorsWNA16", _W4),
    Row("AWQ, CPU", "AutoAWQMarlinLinearMethod", Way.REBUILT, f"{_METHODS}[awq]", kernel=_W4),
    Row("GPTQ, CPU", "AutoGPTQLinearMethod", Way.REBUILT, f"{_METHODS}[gptq]", kernel=_W4),
    Row("compressed-tensors int8, CPU", "CompressedTensorsLinearMethod", Way.FALLS_BACK, _REFUSED,
        "CompressedTensorsW8A8Int8", "CPUInt8ScaledMMLinearKernel", "a oneDNN handle owns the packed weights"),
    Row("AWQ, GPTQ, compressed-tensors on a GPU", "", Way.FALLS_BACK,
        why="no parity run of Marlin, Machete, CUTLASS yet"),
    Row("MoE of AWQ, GPTQ, compressed-tensors", "", Way.FALLS_BACK, why="its kernels can only be made by loading"),
    Row("torchao", "TorchAOLinearMethod", Way.FALLS_BACK, "test_features.py", why="tensor subclasses"),
    Row("online quantization", "", Way.FALLS_BACK, "test_features.py", why="weights are made while loading"),
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
    methods = [m.quant_method for m in modules.values() if _method_rebuilt(m)]
    hooks = [m for m in modules.values() if _hook_rebuilt(m)]
    for owner in (*methods, *hooks):
        owner.process_weights_after_loading = _nothing
    for method in methods:
        method.supports_pre_processed_weights = True
    try:
        yield
    finally:
        for owner in (*methods, *hooks):
            vars(owner).pop("process_weights_after_loading", None)
            vars(owner).pop("supports_pre_processed_weights", None)


def _nothing(*_: Any) -> None:
    return None
