# SPDX-License-Identifier: Apache-2.0
"""Kernels that vLLM's CPU build lacks on some processors, computed with torch, so that real engines of quantized models
run there. Loading and post-processing stay vLLM's own; only a step's arithmetic is made up for, where it is missing.
"""

from __future__ import annotations

from typing import Any

import torch


def emulate() -> None:
    """Fill in what is missing in this process. Engines that are compared with one another must share it."""
    import vllm._custom_ops as ops

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        ops.cpu_gemm_wna16 = gemm_wna16
    try:
        ops.scaled_fp8_quant(torch.ones(1, 8), torch.ones(1))
    except RuntimeError:
        ops.scaled_fp8_quant = scaled_fp8_quant


def gemm_wna16(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """[..., in] times 4-bit weights in blocks of 16 outputs, int32 [out / 16, in * 2]; scales [groups, out]."""
    groups, out = scales.shape
    weight = nibbles(q_weight.view(out // 16, -1, 2), pack_factor).permute(1, 0, 2).reshape(-1, out)
    zero = nibbles(zeros, pack_factor) if zeros is not None else torch.full((groups, out), 8)
    each = weight.shape[0] // groups
    dense = (weight - zero.repeat_interleave(each, 0)) * scales.repeat_interleave(each, 0)
    return torch.nn.functional.linear(input, dense.t().to(input.dtype), bias)


def nibbles(packed: torch.Tensor, factor: int) -> torch.Tensor:
    shifts = torch.arange(factor, dtype=torch.int32) * 4
    return ((packed[..., None] >> shifts) & 15).flatten(-2)


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None:
        most = input.float().abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else input.float().abs().amax()
        scale = (most / 448).clamp_min(1e-12).reshape(-1, 1) if use_per_token_if_dynamic else (most / 448).reshape(1)
    values = (input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    if output is not None:
        output.copy_(values)
        values = output
    return values, scale
