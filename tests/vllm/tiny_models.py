# SPDX-License-Identifier: Apache-2.0
"""Makes tiny random, well-formed checkpoints (run in a child: transformers is slow to import and loud)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BASE = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "tie_word_embeddings": False}


def save(root: Path, name: str, kind: type, config: object) -> None:
    torch.manual_seed(1234)
    model = kind(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)  # large, so that greedy decoding does not fall into a loop at once
    model.save_pretrained(root / name, max_shard_size="1MB")
    vocabulary = {f"w{i}": i for i in range(BASE["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(root / name)


def main() -> None:
    root = Path(sys.argv[1])
    save(root, "llama", LlamaForCausalLM, LlamaConfig(**BASE, tie_word_embeddings=False))
    save(root, "qwen3", Qwen3ForCausalLM, Qwen3Config(**BASE, head_dim=64, tie_word_embeddings=True))
    moe = Qwen3MoeConfig(
        **BASE, **MOE, head_dim=64, num_experts=4, moe_intermediate_size=128, decoder_sparse_step=1, norm_topk_prob=True
    )
    save(root, "qwen3-moe", Qwen3MoeForCausalLM, moe)
    save(root, "mixtral", MixtralForCausalLM, MixtralConfig(**BASE, **MOE, num_local_experts=4, sliding_window=None))


if __name__ == "__main__":
    main()
