# SPDX-License-Identifier: Apache-2.0
"""Tiny real checkpoints, made by Transformers, and plain Transformers engines that are filled by wcache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tiny_checkpoints import zero
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import wcache

transformers.utils.logging.disable_progress_bar()  # its monitor thread would outlive the test that loads first

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3-moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "head_dim": 16, "decoder_sparse_step": 1,
    },
}  # fmt: skip


def make(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """A random checkpoint of one kind, in several files with an index."""
    torch.manual_seed(seed)
    options = {**SIZES, **KINDS[kind]}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory, max_shard_size="100KB")
    return directory


def twin(source: Path, directory: Path, tensor: str) -> Path:
    """A copy with the same headers in which one tensor is zero."""
    shutil.copytree(source, directory)
    zero(directory, tensor)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by safetensors' own loader."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def skeleton(directory: Path) -> nn.Module:
    """The model on the meta device."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def greedy(model: nn.Module, steps: int = 12) -> list[int]:
    ids = torch.tensor([[1, 5, 9, 200, 31]])
    model.eval()
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=steps, do_sample=False)[0].tolist()  # type: ignore[no-any-return,operator]


def disk_tokens(directory: Path) -> list[int]:
    """What a plain Transformers load says."""
    return greedy(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))


def engine(directory: Path, **options: Any) -> tuple[nn.Module, wcache.Attachment]:
    """A plain Transformers model filled by wcache."""
    model = skeleton(directory)
    return model, wcache.load_into(model, directory, init=wcache.init_buffers, **options)
