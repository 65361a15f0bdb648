# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of real architectures, made here: dense, experts, encoders, encoder-decoders, code of their own.

And what tests do with them: twins that differ in one tensor, plain Transformers engines that are filled by wcache.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import wcache

transformers.utils.logging.disable_progress_bar()  # its monitor thread would outlive the test that loads first

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.1,  # wide enough that greedy tokens differ from each other
}  # fmt: skip
# name: (configuration class, its arguments, model class, dtype of the checkpoint)
MODELS: dict[str, tuple[str, dict[str, Any], str, torch.dtype]] = {
    "llama-tied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}, "LlamaForCausalLM", torch.bfloat16),
    "llama-untied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": False}, "LlamaForCausalLM", torch.bfloat16),
    "qwen3": (
        "Qwen3Config", {**SIZES, "tie_word_embeddings": True, "head_dim": 16}, "Qwen3ForCausalLM", torch.bfloat16,
    ),
    "gemma3": (
        "Gemma3TextConfig", {**SIZES, "head_dim": 8, "sliding_window": 8}, "Gemma3ForCausalLM", torch.bfloat16,
    ),
    "gpt2": (
        "GPT2Config", {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "GPT2LMHeadModel", torch.float32,
    ),
    "mixtral": (
        "MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}, "MixtralForCausalLM",
        torch.bfloat16,
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16,
         "decoder_sparse_step": 1},
        "Qwen3MoeForCausalLM", torch.bfloat16,
    ),
    "mamba": (
        "MambaConfig", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "MambaForCausalLM", torch.float32,
    ),
    "t5": (
        "T5Config",
        {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        "T5ForConditionalGeneration", torch.float16,
    ),
    "bert": (
        "BertConfig",
        {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64},
        "BertModel", torch.float32,
    ),
    "vit": (
        "ViTConfig",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "image_size": 16, "patch_size": 8},
        "ViTForImageClassification", torch.float32,
    ),
}  # fmt: skip

OWN_CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class OwnConfig(PreTrainedConfig):
    model_type = "wcache-own"

    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config, factor=FACTOR):
        super().__init__(config)
        self.factor = factor
        self.layer = nn.Linear(config.width, config.width)
        self.register_buffer("running", torch.zeros(config.width))
        self.register_buffer("table", torch.arange(config.width, device="cpu").float() * factor, persistent=False)
        self.steps = torch.arange(3, device="cpu")
        self.same = self.running
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            module.table.copy_(torch.arange(self.config.width).float() * self.factor)

    def forward(self, x):
        return self.layer(x) + self.running
"""


def save(name: str, directory: Path, *, seed: int = 0, **shards: Any) -> Path:
    """A checkpoint of random weights; `shards`: arguments of save_pretrained."""
    config_class, arguments, model_class, dtype = MODELS[name]
    config = getattr(transformers, config_class)(**arguments)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).to(dtype)
    model.save_pretrained(directory, **shards)
    settle(directory)
    return directory


def save_split(name: str, directory: Path, *, seed: int = 0) -> Path:
    """As `save`, in several files with an index."""
    return save(name, directory, seed=seed, max_shard_size="20KB")


def twin(source: Path, directory: Path, tensor: str) -> Path:
    """A copy with the same headers in which one tensor is zero."""
    shutil.copytree(source, directory)
    zero(directory, tensor)
    return directory


def zero(checkpoint: Path, tensor: str) -> None:
    """Overwrite one tensor's bytes with zeros in place; the headers stay as they are."""
    index = checkpoint / "model.safetensors.index.json"
    name = json.loads(index.read_text())["weight_map"][tensor] if index.exists() else "model.safetensors"
    file = checkpoint / name
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    data[8 + length + begin : 8 + length + end] = bytes(end - begin)
    file.write_bytes(data)


def settle(directory: Path) -> None:
    """Wait until a digest taken now is trusted later: files younger than that margin are hashed again."""
    newest = max(p.stat().st_ctime_ns for p in directory.iterdir())
    while time.time_ns() - newest < 150_000_000:
        time.sleep(0.01)


def input_ids() -> torch.Tensor:
    return torch.tensor([[5, 9, 17, 33]])


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by safetensors' own loader."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def skeleton(directory: Path) -> nn.Module:
    """The language model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)


def engine(directory: Path, **options: Any) -> tuple[nn.Module, wcache.Attachment]:
    """A plain Transformers model filled by wcache."""
    model = skeleton(directory)
    return model, wcache.load_into(model, directory, init=wcache.init_buffers, **options)


def greedy(model: nn.Module) -> list[int]:
    """The prompt and what a language model says to it, whether or not it would end before."""
    ids = input_ids()
    model.eval()
    with torch.no_grad():
        for _ in range(10):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()
