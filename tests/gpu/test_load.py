# SPDX-License-Identifier: Apache-2.0
"""Loading on a real GPU: every byte as safetensors reads it, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wcache.host.fds import close_all
from wcache.host.gpu_memory import MIB, measure

Spawn = Callable[..., Any]
OVERHEAD_BYTES = 600 * MIB  # what any process with a context costs (527 MiB on an H200), and nothing else may be taken


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 1.1 GB in two files, with row-parallel weights that are strided in them."""
    import torch
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("llama")
    hidden, inner, layers, vocab = 2048, 5632, 8, 32000
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": layers,
        "vocab_size": vocab, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden), f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{layer}.self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden), f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    torch.manual_seed(0)
    names = sorted(shapes)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in files.items():
        tensors = {n: torch.randint(-9999, 9999, shapes[n], dtype=torch.int16).view(torch.bfloat16) for n in mine}
        save_file({n: t.nan_to_num(0.5) for n, t in tensors.items()}, directory / file)
    weight_map = {name: file for file, mine in files.items() for name in mine}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.keeps("torch's thread pool, which made the checkpoint")
@pytest.mark.parametrize(
    ("tp", "rank", "dtype"), [(1, 0, "auto"), (2, 0, "auto"), (2, 1, "auto"), (4, 3, "auto"), (2, 1, "float32")]
)
def test_every_tensor_of_a_rank_is_the_slice_that_safetensors_reads(
    spawn: Spawn, gpu: str, checkpoint: Path, tp: int, rank: int, dtype: str
) -> None:
    answer = spawn("loader").ask(gpu=gpu, directory=str(checkpoint), tp=tp, rank=rank, dtype=dtype)
    assert answer["wrong"] == [] and answer["digests"]
    assert answer["seen"] == answer["tensors"] == 75


def test_a_load_takes_the_weights_and_one_context_and_keeps_the_weights_alone(
    spawn: Spawn, gpu: str, checkpoint: Path, peak: Callable[[], Any], memory_comes_back: int, wait_until: Any
) -> None:
    child = spawn("loader")
    with peak() as most:
        answer, fds = child.ask_fds(gpu=gpu, directory=str(checkpoint), tp=1, rank=0, dtype="auto", only_load=True)
        child.kill()
    kept = memory_comes_back + answer["weights"]
    try:
        assert most.used - kept <= OVERHEAD_BYTES
        wait_until(lambda: abs(measure(gpu).used - kept) <= 2 * MIB, 10, "exactly the weights stay")
    finally:
        close_all(fds)
