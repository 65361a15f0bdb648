# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel engine for tests: Transformers' Llama with local sizes, one process a rank, gloo between them.

    python tp_llama.py RANK WORLD RENDEZVOUS_FILE CHECKPOINT SOCKET_DIR

Runs twice in one process: "disk", filled by slicing what safetensors reads, in code that shares nothing with wcache's
own sharding, and "cache", filled by wcache. Prints one JSON object: for both, greedy tokens and a digest of every
parameter; and where wcache had the weights from.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import tiny_checkpoints as tiny
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import wcache

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW = ("o_proj", "down_proj")


def build(directory: Path, rank: int, world: int) -> nn.Module:
    """The model on meta with this rank's sizes, and the collectives that tensor parallelism needs."""
    config = AutoConfig.from_pretrained(directory)
    config.head_dim = config.hidden_size // config.num_attention_heads
    for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        setattr(config, size, getattr(config, size) // world)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    start, size = rank * config.vocab_size, config.vocab_size

    def look_up_local(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (ids,) = args
        module.outside = (ids < start) | (ids >= start + size)
        return ((ids - start).masked_fill(module.outside, 0),)

    def sum_embeddings(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.masked_fill(module.outside.unsqueeze(-1), 0)
        dist.all_reduce(output)
        return output

    def sum_partial(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(output)
        return output

    def gather_logits(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(world)]
        dist.all_gather(parts, output.contiguous())
        return torch.cat(parts, -1)

    model.model.embed_tokens.register_forward_pre_hook(look_up_local)
    model.model.embed_tokens.register_forward_hook(sum_embeddings)
    model.lm_head.register_forward_hook(gather_logits)
    for name, module in model.named_modules():
        if name.endswith(ROW):
            module.register_forward_hook(sum_partial)
    return model


def from_disk(model: nn.Module, directory: Path, rank: int, world: int) -> None:
    """Slice full tensors by hand."""
    state = {}
    for name, tensor in tiny.tensors_of(directory).items():
        owner = name.split(".")[-2]
        dim = 0 if owner in COLUMN else 1 if owner in ROW else None
        state[name] = (tensor if dim is None else tensor.chunk(world, dim)[rank]).float().contiguous()
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    wcache.init_buffers(model)


def digests(model: nn.Module) -> dict[str, str]:
    return {
        n: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for n, p in model.named_parameters(remove_duplicate=False)
    }


def main() -> None:
    rank, world, rendezvous, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    plain = build(directory, rank, world)
    from_disk(plain, directory, rank, world)
    disk = {"tokens": tiny.greedy(plain), "digests": digests(plain)}
    model = build(directory, rank, world)
    attachment = wcache.load_into(
        model, directory, init=wcache.init_buffers, rank=rank, tp_size=world, dtype="float32",
        socket_dir=sys.argv[5], fallback=False,
    )  # fmt: skip
    cache = {"tokens": tiny.greedy(model), "digests": digests(model)}
    dist.destroy_process_group()
    print(json.dumps({"disk": disk, "cache": cache, "source": attachment.source}))


if __name__ == "__main__":
    main()
