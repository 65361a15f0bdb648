# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the formats that quantization methods of vLLM read, made of small unquantized ones.

    quantize_model.py CHECKPOINT DIR FORMAT...      DIR/FORMAT, the projections of CHECKPOINT in that format

For tests and benchmarks: rounded to nearest, nothing is calibrated. Formats that end in -128 have groups of 128 values
with a common scale (the others 32), and fp8-block blocks of 128 x 128: their layers need such sizes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP, WIDE_GROUP, BLOCK, NVFP4_GROUP = 32, 128, 128, 16
FP8_MAX, FP4_MAX = 448.0, 6.0
FP4_STEPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
# Where each method's configuration lists the layers that are as they were.
LEFT = {"fp8": "modules_to_not_convert", "compressed-tensors": "ignore", "modelopt": "ignore"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[str, torch.Tensor], Tensors]


def grouped(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed integers [out, in] and their scales [out, in / group]."""
    most = 2 ** (bits - 1) - 1
    groups = weight.float().unflatten(1, (-1, group))
    scale = groups.abs().amax(-1) / most
    values = (groups / scale[..., None]).round().clamp(-most - 1, most)
    return values.flatten(1).to(torch.int32), scale.to(weight.dtype)


def nibbles(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight 4-bit values (0..15) along `dim` in each int32, the first in the lowest bits."""
    parts = values.to(torch.int64).unflatten(dim, (-1, 8)).unbind(dim + 1)
    packed = sum(part << (4 * i) for i, part in enumerate(parts))
    return torch.as_tensor(packed).to(torch.uint32).view(torch.int32)


def awq(name: str, weight: torch.Tensor, *, group: int) -> Tensors:
    values, scale = grouped(weight, 4, group)
    stem = name.removesuffix("weight")
    order = torch.tensor(AWQ_ORDER)
    zeros = torch.full_like(scale.t(), 8, dtype=torch.int32)
    reordered = [t.unflatten(1, (-1, 8))[..., order].flatten(1) for t in ((values + 8).t(), zeros)]
    return {
        f"{stem}qweight": nibbles(reordered[0], 1).contiguous(),
        f"{stem}qzeros": nibbles(reordered[1], 1).contiguous(),
        f"{stem}scales": scale.t().contiguous(),
    }


def gptq(name: str, weight: torch.Tensor, *, group: int) -> Tensors:
    values, scale = grouped(weight, 4, group)
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": nibbles((values + 8).t(), 0).contiguous(),
        f"{stem}qzeros": nibbles(torch.full_like(scale.t(), 7, dtype=torch.int32), 1).contiguous(),
        f"{stem}scales": scale.t().contiguous(),
        f"{stem}g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }


def packed(name: str, weight: torch.Tensor, *, group: int) -> Tensors:
    values, scale = grouped(weight, 4, group)
    return {
        f"{name}_packed": nibbles(values + 8, 1).contiguous(),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
    }


def int8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().clamp(-128, 127).to(torch.int8), f"{name}_scale": scale.to(weight.dtype)}


def fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scale).to(torch.float8_e4m3fn)


def fp8_tensor(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax() / FP8_MAX
    return {name: fp8(weight, scale), f"{name}_scale": scale}


def fp8_static(name: str, weight: torch.Tensor) -> Tensors:
    return {**fp8_tensor(name, weight), f"{name.removesuffix('weight')}input_scale": torch.tensor(0.02)}


def fp8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / FP8_MAX
    return {name: fp8(weight, scale), f"{name}_scale": scale}


def fp8_block(name: str, weight: torch.Tensor) -> Tensors:
    """As DeepSeek V3 and Qwen3-FP8 have it."""
    scale = weight.float().abs().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3)) / FP8_MAX
    each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {name: fp8(weight, each), f"{name}_scale_inv": scale}


def nvfp4(name: str, weight: torch.Tensor) -> Tensors:
    """As ModelOpt has it: two values of four bits in a byte, an FP8 scale for 16 of them, one scale for all."""
    whole = weight.float().abs().amax() / (FP8_MAX * FP4_MAX)
    groups = weight.float().unflatten(1, (-1, NVFP4_GROUP))
    scale = (groups.abs().amax(-1) / (FP4_MAX * whole)).to(torch.float8_e4m3fn)
    values = (groups / (scale.float() * whole).clamp_min(1e-12)[..., None]).flatten(1)
    code = (values.abs()[..., None] - torch.tensor(FP4_STEPS)).abs().argmin(-1) + 8 * (values < 0)
    pairs = code.to(torch.uint8).unflatten(1, (-1, 2))
    stem = name.removesuffix("weight")
    return {
        name: pairs[..., 0] | (pairs[..., 1] << 4), f"{stem}weight_scale": scale, f"{stem}weight_scale_2": whole,
        f"{stem}input_scale": torch.tensor(0.02 / FP4_MAX),
    }  # fmt: skip


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }  # fmt: skip


def _ints(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _fp8(scheme: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": scheme, **more}


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def _four_bits(group: int, suffix: str) -> dict[str, tuple[Quantize, dict[str, Any]]]:
    common = {"bits": 4, "group_size": group}
    ints = _ints(4, "int", "group", group_size=group)
    return {
        f"awq{suffix}": (partial(awq, group=group), {
            "quant_method": "awq", "zero_point": True, "version": "gemm", **common}),
        f"gptq{suffix}": (partial(gptq, group=group), {
            "quant_method": "gptq", "desc_act": False, "sym": True, **common}),
        f"packed-int4{suffix}": (partial(packed, group=group), compressed("pack-quantized", ints, None)),
    }  # fmt: skip


FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    **_four_bits(GROUP, ""),
    **_four_bits(WIDE_GROUP, "-128"),
    "int8": (int8, compressed(
        "int-quantized", _ints(8, "int", "channel"), {**_ints(8, "int", "token"), "dynamic": True})),
    "fp8-channel": (fp8_channel, compressed(
        "float-quantized", _ints(8, "float", "channel"), {**_ints(8, "float", "token"), "dynamic": True})),
    "fp8": (fp8_tensor, _fp8("dynamic")),
    "fp8-static": (fp8_static, _fp8("static")),
    "fp8-block": (fp8_block, _fp8("dynamic", weight_block_size=[BLOCK, BLOCK])),
    "modelopt-fp8": (fp8_static, _modelopt("FP8")),
    "nvfp4": (nvfp4, _modelopt("NVFP4", group_size=NVFP4_GROUP)),
}  # fmt: skip


def quantize(source: Path, target: Path, name: str) -> Path:
    """A copy of a checkpoint whose projections are in the named format. Raises RuntimeError for unfit sizes."""
    how, config = FORMATS[name]
    target.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    left: list[str] = []
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            made: Tensors = {}
            for key, tensor in load_file(file).items():
                made |= how(key, tensor) if key.endswith(LINEAR) else {key: tensor}
                if tensor.ndim > 1 and not key.endswith(LINEAR):
                    left.append(key.removesuffix(".weight"))
            save_file(made, target / file.name, {"format": "pt"})
            weight_map |= dict.fromkeys(made, file.name)
        elif file.is_file() and not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    text = json.loads((source / "config.json").read_text())
    untouched = {LEFT[config["quant_method"]]: sorted(left)} if config["quant_method"] in LEFT else {}
    (target / "config.json").write_text(json.dumps({**text, "quantization_config": {**config, **untouched}}))
    return target


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("source", type=Path)
    p.add_argument("directory", type=Path)
    p.add_argument("formats", nargs="+", choices=list(FORMATS), metavar="FORMAT")
    args = p.parse_args()
    for name in args.formats:
        print(quantize(args.source, args.directory / name, name))


if __name__ == "__main__":
    main()
