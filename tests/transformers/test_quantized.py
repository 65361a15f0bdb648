# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: what Transformers makes of them comes back bit for bit, or is refused by method."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equality
import pytest
import safetensors.torch
import tiny_checkpoints as tiny
import torch
import transformers
from daemons import Daemon

import wcache
from wcache.engine.transformers import layout

# compressed-tensors warns when it is imported, and Transformers of every quantization_config beside the checkpoint's.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]

BLOCK = 16

Quantize = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


def rewrite(
    directory: Path, quantization: dict[str, Any], quantize: Callable[[str, torch.Tensor], dict[str, Any]]
) -> Path:
    """Replace the linear layers of a checkpoint's blocks by what `quantize` makes of them."""
    file = directory / "model.safetensors"
    made: dict[str, torch.Tensor] = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        linear = name.endswith("_proj.weight")
        made |= quantize(name, tensor) if linear else {name: tensor}
    safetensors.torch.save_file(made, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    tiny.settle(directory)
    return directory


def fp8_blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    packed = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {name: packed, f"{name}_scale_inv": scale}


def fp8(directory: Path) -> Path:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return rewrite(tiny.save("llama-untied", directory), config, fp8_blocks)


def packed(bits: int) -> Quantize:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    most = 2 ** (bits - 1) - 1

    def quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.float().abs().amax(1, keepdim=True) / most
        values = (weight / scale).round().clamp(-most - 1, most).to(torch.int8)
        return {
            f"{name}_packed": pack_to_int32(values, bits),
            f"{name}_scale": scale.to(weight.dtype),
            f"{name}_shape": torch.tensor(weight.shape),
        }

    return quantize


def compressed(directory: Path, bits: int) -> Path:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return rewrite(tiny.save("llama-untied", directory), config, packed(bits))


def decompressed() -> dict[str, Any]:
    return {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (fp8, dict),
        (lambda d: compressed(d, 8), dict),
        (lambda d: compressed(d, 4), dict),
        (lambda d: compressed(d, 4), decompressed),
    ],
    ids=["fp8", "compressed-8-bit", "compressed-4-bit", "decompressed"],
)
def test_a_quantized_model_is_what_transformers_makes_of_it(
    short_dir: Path, load: Callable[..., Any], opened: Callable[..., Any], make: Any, given: Any
) -> None:
    directory, options = make(short_dir / "model"), given()
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    cold = load(directory, **options)
    with opened(directory) as names:
        warm = load(directory, **options, fallback=False)
    assert not [n for n in names if n.endswith(".safetensors")]
    for model in (cold, warm):
        equality.same(model, plain)
    with torch.no_grad():
        logits = [m(tiny.input_ids()).logits for m in (plain, cold, warm)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_method_that_keeps_objects_beside_its_tensors_is_refused_by_name(
    daemon: Daemon,
    short_dir: Path,
    load: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any quantizer that is not known to leave plain tensors; here one that for once is not on the list."""
    directory = compressed(short_dir / "model", 4)
    monkeypatch.setattr(layout, "_KNOWN_METHODS", {"fp8": None})
    with caplog.at_level(logging.WARNING):
        model = load(directory)
    assert "Weight cache unusable (unsupported: quantization" in caplog.text
    assert "keeps its state in objects beside the tensors" in caplog.text
    assert wcache.transformers.attachment(model) is None
    assert not daemon.status().shards
