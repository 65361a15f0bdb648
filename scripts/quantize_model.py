# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in the formats that quantization methods of vLLM read, made of a tiny random Llama or Mixtral.

python quantized.py DIR NAME...
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[str, torch.Tensor], Tensors]


def grouped(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed integers [out, in] and their scales [out, in / GROUP]."""
    most = 2 ** (bits - 1) - 1
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / most
    values = (groups / scale[..., None]).round().clamp(-most - 1, most)
    return values.flatten(1).to(torch.int32), scale.to(weight.dtype)


def nibbles(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight 4-bit values (0..15) along `dim` in each int32, the first in the lowest bits."""
    parts = values.to(torch.int64).unflatten(dim, (-1, 8)).unbind(dim + 1)
    packed = sum(part << (4 * i) for i, part in enumerate(parts))
    return torch.as_tensor(packed).to(torch.uint32).view(torch.int32)


def awq(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = grouped(weight, 4)
    stem = name.removesuffix("weight")
    order = torch.tensor(AWQ_ORDER)
    zeros = torch.full_like(scale.t(), 8, dtype=torch.int32)
    reordered = [t.unflatten(1, (-1, 8))[..., order].flatten(1) for t in ((values + 8).t(), zeros)]
    return {
        f"{stem}qweight": nibbles(reordered[0], 1).contiguous(),
        f"{stem}qzeros": nibbles(reordered[1], 1).contiguous(),
        f"{stem}scales": scale.t().contiguous(),
    }


def gptq(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = grouped(weight, 4)
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": nibbles((values + 8).t(), 0).contiguous(),
        f"{stem}qzeros": nibbles(torch.full_like(scale.t(), 7, dtype=torch.int32), 1).contiguous(),
        f"{stem}scales": scale.t().contiguous(),
        f"{stem}g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def packed(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = grouped(weight, 4)
    return {
        f"{name}_packed": nibbles(values + 8, 1).contiguous(),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
    }


def int8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().clamp(-128, 127).to(torch.int8), f"{name}_scale": scale.to(weight.dtype)}


def fp8_tensor(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax() / 448
    return {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def fp8_static(name: str, weight: torch.Tensor) -> Tensors:
    return {**fp8_tensor(name, weight), f"{name.removesuffix('weight')}input_scale": torch.tensor(0.02)}


def fp8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def _ints(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "packed-int4": (packed, compressed("pack-quantized", _ints(4, "int", "group", group_size=GROUP), None)),
    "int8": (int8, compressed(
        "int-quantized", _ints(8, "int", "channel"), {**_ints(8, "int", "token"), "dynamic": True})),
    "fp8-channel": (fp8_channel, compressed(
        "float-quantized", _ints(8, "float", "channel"), {**_ints(8, "float", "token"), "dynamic": True})),
    "fp8": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-static": (fp8_static, {"quant_method": "fp8", "activation_scheme": "static"}),
}  # fmt: skip


def quantize(source: Path, target: Path, name: str) -> Path:
    """A copy of a checkpoint whose projections are in the named format."""
    how, config = FORMATS[name]
    target.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            made: Tensors = {}
            for key, tensor in load_file(file).items():
                made |= how(key, tensor) if key.endswith(LINEAR) else {key: tensor}
            save_file(made, target / file.name, {"format": "pt"})
            weight_map |= dict.fromkeys(made, file.name)
        elif file.is_file() and not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    text = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**text, "quantization_config": config}))
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
