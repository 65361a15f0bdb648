# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a checkpoint a rank takes, checked against torch's own slicing of the same tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import CheckpointError, ConfigError, PlanError
from wcache.model import CheckpointFault, Placement, Sizes
from wcache.weights.checkpoint import Checkpoint, Survey, TensorEntry
from wcache.weights.fingerprint import layout_id
from wcache.weights.plan import Plan, plan_for
from wcache.weights.sharding import ShardPlan, layout_key, shard

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 8,
}  # fmt: skip


def checkpoint(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> tuple[Checkpoint, bytes]:
    """A checkpoint of one file, and the file's bytes."""
    data, entries = b"header", {}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = TensorEntry(name, dtype, tuple(tensor.shape), 0, len(data), len(raw))
        data += raw
    return Checkpoint(Survey(Path("/model"), (), None, config, {}), entries, 0, ()), data


def read(plan: ShardPlan, data: bytes) -> dict[str, torch.Tensor]:
    """What the shard holds, by name, assembled byte by byte as the pieces say (no casts)."""
    found = {}
    for tensor in plan.tensors:
        memory, written = bytearray(tensor.nbytes), 0
        for p in tensor.pieces:
            for row in range(p.rows):
                start, target = p.offset + row * p.pitch, p.target + row * p.target_pitch
                assert target + p.run <= len(memory)
                memory[target : target + p.run] = data[start : start + p.run]
                written += p.run
        assert written == len(memory)
        flat = torch.frombuffer(memory, dtype=getattr(torch, tensor.dtype)) if memory else torch.empty(0)
        for name in tensor.names:
            found[name] = flat.reshape(tensor.shape)
    return found


def ranks(sizes: Sizes) -> list[Placement]:
    return [Placement(sizes, rank) for rank in range(sizes.world)]


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def llama(config: dict[str, Any] = CONFIG, layers: int = 1) -> dict[str, torch.Tensor]:
    hidden, inter, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    tensors = {"model.embed_tokens.weight": numbered(config["vocab_size"], hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        tensors |= {
            f"{layer}self_attn.q_proj.weight": numbered(q, hidden),
            f"{layer}self_attn.q_proj.bias": numbered(q),
            f"{layer}self_attn.k_proj.weight": numbered(kv, hidden),
            f"{layer}self_attn.k_proj.bias": numbered(kv),
            f"{layer}self_attn.v_proj.weight": numbered(kv, hidden),
            f"{layer}self_attn.o_proj.weight": numbered(hidden, q),
            f"{layer}self_attn.o_proj.bias": numbered(hidden),
            f"{layer}self_attn.q_norm.weight": numbered(d),
            f"{layer}mlp.gate_proj.weight": numbered(inter, hidden),
            f"{layer}mlp.up_proj.weight": numbered(inter, hidden),
            f"{layer}mlp.down_proj.weight": numbered(hidden, inter),
            f"{layer}input_layernorm.weight": numbered(hidden),
            f"{layer}post_attention_layernorm.weight": numbered(hidden),
        }
    return tensors | {"model.norm.weight": numbered(hidden), "lm_head.weight": numbered(config["vocab_size"], hidden)}


def shards(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], sizes: Sizes, plan: Plan | None = None
) -> list[dict[str, torch.Tensor]]:
    model, data = checkpoint(tensors, config)
    plan = plan or plan_for(config, None)
    return [read(shard(model, plan, placement), data) for placement in ranks(sizes)]


def toml(tmp_path: Path, text: str) -> Plan:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return plan_for({}, path)


@st.composite
def dense_configs(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    tp = draw(st.sampled_from([1, 2, 4]))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    heads = math.lcm(kv, tp) * draw(st.integers(1, 2))
    d = draw(st.integers(1, 3))
    return {
        **CONFIG, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d,
        "hidden_size": draw(st.integers(1, 9)), "intermediate_size": tp * draw(st.integers(1, 5)),
        "vocab_size": tp * draw(st.integers(1, 5)),
    }, tp  # fmt: skip


@given(drawn=dense_configs())
def test_the_shards_of_all_ranks_together_are_every_logical_tensor_exactly(drawn: tuple[dict[str, Any], int]) -> None:
    config, tp = drawn
    tensors = llama(config)
    parts = shards(tensors, config, Sizes(tp=tp))
    kv = config["num_key_value_heads"]
    for name, whole in tensors.items():
        mine = [part[name] for part in parts]
        if "o_proj.weight" in name or "down_proj" in name:
            assert torch.equal(torch.cat(mine, 1), whole)
        elif "k_proj" in name or "v_proj" in name:
            replicas = max(tp // kv, 1)
            assert all(torch.equal(mine[i], mine[i - i % replicas]) for i in range(tp))
            assert torch.equal(torch.cat(mine[::replicas]), whole)
        elif "norm" in name or name.endswith("o_proj.bias"):
            assert all(torch.equal(m, whole) for m in mine)
        else:
            assert torch.equal(torch.cat(mine), whole)


def test_pipeline_stages_hold_ranges_of_layers_embedding_first_head_last() -> None:
    config = {**CONFIG, "num_hidden_layers": 3}
    parts = shards(llama(config, 3), config, Sizes(pp=2))
    assert set(parts[0]) | set(parts[1]) == set(llama(config, 3))
    assert not set(parts[0]) & set(parts[1])
    assert {n.split(".")[2] for n in parts[0] if "layers" in n} == {"0", "1"}
    assert {n.split(".")[2] for n in parts[1] if "layers" in n} == {"2"}
    assert "model.embed_tokens.weight" in parts[0]
    assert {"model.norm.weight", "lm_head.weight"} <= set(parts[1])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="pp_size 2 for a model of 1 layers"):
        shards(llama(), CONFIG, Sizes(pp=2))


@pytest.mark.parametrize(
    ("change", "tp", "words"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 2, "hidden_size": 8}, 2, ["9 heads", "2"]),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 4, ["k_proj", "3 heads", "tp_size 4", "size 6"]),
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, 2, ["3 heads do not divide by tp_size 2"]),
        ({"vocab_size": 7}, 2, ["embed_tokens.weight", "dim 0", "size 7", "tp_size 2"]),
        ({"intermediate_size": 15}, 2, ["_proj.weight", "size 15", "tp_size 2"]),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(change: dict[str, int], tp: int, words: list[str]) -> None:
    config = {**CONFIG, **change}
    with pytest.raises(PlanError) as error:
        shards(llama(config), config, Sizes(tp=tp))
    for word in words:
        assert word in str(error.value)


def test_one_rank_takes_a_model_whose_heads_do_not_divide() -> None:
    config = {**CONFIG, "num_attention_heads": 9, "num_key_value_heads": 3}
    tensors = llama(config)
    [part] = shards(tensors, config, Sizes())
    assert all(torch.equal(part[name], tensors[name]) for name in tensors)


# --- ties -------------------------------------------------------------------------------------------------------------


def test_a_head_that_the_file_lacks_is_a_second_name_of_the_embedding_and_counts_once() -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    config = {**CONFIG, "tie_word_embeddings": True}
    model, _ = checkpoint(tensors, config)
    plan = shard(model, plan_for(config, None), Placement(Sizes(tp=2), 1))
    assert ("model.embed_tokens.weight", "lm_head.weight") in {t.names for t in plan.tensors}
    names = [n for t in plan.tensors for n in t.names]
    assert len(names) == len(set(names))
    untied, _ = checkpoint(llama(), CONFIG)
    head = 4 * 8 * 4
    assert plan.nbytes == shard(untied, plan_for(CONFIG, None), Placement(Sizes(tp=2), 1)).nbytes - head


def test_a_tied_head_and_embedding_that_are_both_in_the_file_stay_two_tensors() -> None:
    tensors = llama()
    tensors["lm_head.weight"] += 1
    [part] = shards(tensors, {**CONFIG, "tie_word_embeddings": True}, Sizes())
    assert torch.equal(part["lm_head.weight"], part["model.embed_tokens.weight"] + 1)


def test_a_tied_embedding_that_the_file_lacks_is_taken_from_the_head() -> None:
    tensors = llama()
    del tensors["model.embed_tokens.weight"]
    [part] = shards(tensors, {**CONFIG, "tie_word_embeddings": True}, Sizes())
    assert part["model.embed_tokens.weight"].data_ptr() == part["lm_head.weight"].data_ptr()


def test_with_stages_the_last_one_gets_its_own_copy_of_a_tied_head() -> None:
    config = {**CONFIG, "num_hidden_layers": 2, "tie_word_embeddings": True}
    tensors = llama(config, 2)
    del tensors["lm_head.weight"]
    first, last = shards(tensors, config, Sizes(pp=2))
    assert "lm_head.weight" not in first
    assert "model.embed_tokens.weight" not in last
    assert torch.equal(last["lm_head.weight"], tensors["model.embed_tokens.weight"])


# --- completeness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_tensor_of_the_model_is_not_split_and_the_refusal_names_it(lost: str) -> None:
    tensors = llama()
    del tensors[lost]
    with pytest.raises(CheckpointError) as error:
        shards(tensors, CONFIG, Sizes(tp=2))
    assert error.value.fault is CheckpointFault.MISSING_TENSOR
    assert lost.rpartition(".")[0] in str(error.value)


def test_a_rank_of_its_own_holds_whatever_the_checkpoint_names_and_says_what_is_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = llama() | {"of.another.model": numbered(4)}
    del tensors["model.norm.weight"]
    (found,) = shards(tensors, CONFIG, Sizes())
    assert found.keys() == tensors.keys()
    assert "lacks model.norm" in caplog.text


def test_a_layer_beyond_those_of_the_configuration_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layer 1, but config\.json has num_hidden_layers = 1"):
        shards(llama(CONFIG, 2), CONFIG, Sizes())


def test_the_inverse_frequencies_of_old_checkpoints_are_skipped() -> None:
    tensors = llama() | {"model.layers.0.self_attn.rotary_emb.inv_freq": numbered(4)}
    model, _ = checkpoint(tensors, CONFIG)
    plan = shard(model, plan_for(CONFIG, None), Placement(Sizes(), 0))
    assert plan.skipped == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert len(plan.tensors) == len(tensors) - 1


def test_a_tensor_without_a_rule_is_taken_whole_by_one_rank_and_refused_by_two() -> None:
    tensors = llama() | {"model.layers.0.self_attn.q_proj.qweight": numbered(4, 4)}
    assert "model.layers.0.self_attn.q_proj.qweight" in shards(tensors, CONFIG, Sizes())[0]
    with pytest.raises(PlanError, match=r"q_proj.qweight matches no rule of plan llama; with tp_size 2"):
        shards(tensors, CONFIG, Sizes(tp=2))


# --- experts ----------------------------------------------------------------------------------------------------------

MOE = {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


def mixtral() -> dict[str, torch.Tensor]:
    tensors = {k: v for k, v in llama().items() if ".mlp." not in k}
    moe = "model.layers.0.block_sparse_moe."
    tensors[f"{moe}gate.weight"] = numbered(4, 8)
    for e in range(4):
        tensors[f"{moe}experts.{e}.w1.weight"] = numbered(16, 8) + 1000 * e
        tensors[f"{moe}experts.{e}.w2.weight"] = numbered(8, 16) + 1000 * e + 200
        tensors[f"{moe}experts.{e}.w3.weight"] = numbered(16, 8) + 1000 * e + 400
    return tensors


def stacked(tensors: dict[str, torch.Tensor], which: str) -> torch.Tensor:
    moe = "model.layers.0.block_sparse_moe.experts."
    return torch.stack([tensors[f"{moe}{e}.{which}.weight"] for e in range(4)])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_experts_are_stacked_as_transformers_stacks_them_and_split_inside(tp: int) -> None:
    tensors = mixtral()
    parts = shards(tensors, MOE, Sizes(tp=tp))
    for rank, part in enumerate(parts):
        gate, up = (stacked(tensors, w).chunk(tp, 1)[rank] for w in ("w1", "w3"))
        assert torch.equal(part["model.layers.0.mlp.experts.gate_up_proj"], torch.cat([gate, up], 1))
        down = stacked(tensors, "w2").chunk(tp, 2)[rank]
        assert torch.equal(part["model.layers.0.mlp.experts.down_proj"], down)
        assert torch.equal(
            part["model.layers.0.mlp.gate.weight"], tensors["model.layers.0.block_sparse_moe.gate.weight"]
        )


def test_with_expert_parallelism_each_rank_has_its_own_experts_whole() -> None:
    tensors = mixtral()
    parts = shards(tensors, MOE, Sizes(tp=2, ep=2))
    down = [part["model.layers.0.mlp.experts.down_proj"] for part in parts]
    assert torch.equal(torch.cat(down), stacked(tensors, "w2"))
    assert parts[0]["model.layers.0.self_attn.q_proj.weight"].shape == (4, 8)


def test_every_stage_has_every_expert_of_its_layers_between_its_ranks() -> None:
    config = {**MOE, "num_hidden_layers": 2}
    tensors = mixtral()
    tensors |= {k.replace("layers.0", "layers.1"): v for k, v in tensors.items() if "layers.0" in k}
    plan = plan_for(config, Path("mixtral-experts"))
    parts = shards(tensors, config, Sizes(tp=2, pp=2, ep=2), plan)
    assert set().union(*parts) == set(tensors)


def test_experts_keep_the_names_of_the_checkpoint_if_the_packaged_plan_for_that_is_named() -> None:
    tensors = mixtral()
    parts = shards(tensors, MOE, Sizes(tp=2, ep=2), plan_for(MOE, Path("mixtral-experts")))
    assert "model.layers.0.block_sparse_moe.experts.1.w1.weight" in parts[0]
    assert "model.layers.0.block_sparse_moe.experts.1.w1.weight" not in parts[1]
    assert set(parts[0]) | set(parts[1]) == set(tensors)


@pytest.mark.parametrize("plan", ["mixtral", "mixtral-experts"])
def test_a_missing_expert_is_an_incomplete_checkpoint_on_every_rank(plan: str) -> None:
    tensors = mixtral()
    del tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    model, _ = checkpoint(tensors, MOE)
    for placement in ranks(Sizes(tp=2, ep=2)):
        with pytest.raises(CheckpointError, match=r"lacks .*experts\.3\.w2"):
            shard(model, plan_for(MOE, Path(plan)), placement)


def test_experts_that_do_not_divide_by_ep_are_refused() -> None:
    with pytest.raises(PlanError, match="4 experts do not divide by ep_size 3"):
        shards(mixtral(), MOE, Sizes(dp=3, ep=3))


# --- quantised --------------------------------------------------------------------------------------------------------

FP8 = {
    **CONFIG, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def fp8(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = llama(config)
    for name, weight in list(tensors.items()):
        if "_proj.weight" in name:
            rows, columns = (-(-n // 128) for n in weight.shape)
            tensors[name] = torch.randint(0, 120, weight.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = numbered(rows, columns)
    return tensors


def test_block_scales_are_split_with_the_blocks_of_their_weight() -> None:
    tensors = fp8(FP8)
    one, two = shards(tensors, {**FP8, "num_key_value_heads": 2}, Sizes(tp=1)), None
    assert torch.equal(one[0]["model.layers.0.mlp.down_proj.weight_scale_inv"], numbered(2, 4))
    config = {**FP8, "num_attention_heads": 4, "num_key_value_heads": 4}
    two = shards(fp8(config), config, Sizes(tp=2))
    for name, dim in [("mlp.down_proj", 1), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("self_attn.k_proj", 0)]:
        scales = [part[f"model.layers.0.{name}.weight_scale_inv"] for part in two]
        assert scales[0].shape[dim] * 128 == two[0][f"model.layers.0.{name}.weight"].shape[dim]
        whole = fp8(config)[f"model.layers.0.{name}.weight_scale_inv"]
        assert torch.equal(torch.cat(scales, dim), whole)


def test_a_cut_through_a_quantisation_block_is_refused_with_numbers_and_fine_on_one_rank() -> None:
    config = {**FP8, "intermediate_size": 192, "num_key_value_heads": 4}
    shards(fp8(config), config, Sizes())
    with pytest.raises(PlanError) as error:
        shards(fp8(config), config, Sizes(tp=2))
    for number in ("192", "96", "128", "tp_size 2"):
        assert number in str(error.value)


def test_scales_of_a_whole_tensor_go_to_every_rank_and_those_of_channels_with_their_channels() -> None:
    tensors = llama()
    layer = "model.layers.0."
    tensors |= {
        f"{layer}self_attn.q_proj.weight_scale": numbered(8, 1),
        f"{layer}self_attn.o_proj.weight_scale": numbered(8, 1),
        f"{layer}mlp.up_proj.weight_scale": numbered(1),
        f"{layer}mlp.down_proj.weight_scale": numbered(),
        f"{layer}mlp.down_proj.input_scale": numbered(),
    }
    parts = shards(tensors, CONFIG, Sizes(tp=2))
    assert parts[1][f"{layer}self_attn.q_proj.weight_scale"].flatten().tolist() == [4, 5, 6, 7]
    for name in ("self_attn.o_proj.weight_scale", "mlp.up_proj.weight_scale", "mlp.down_proj.input_scale"):
        assert torch.equal(parts[1][layer + name], tensors[layer + name])


def test_stacked_block_scales_are_laid_out_like_their_weights() -> None:
    config = {**MOE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {k: v for k, v in llama(config).items() if ".mlp." not in k}
    moe = "model.layers.0.block_sparse_moe."
    tensors[f"{moe}gate.weight"] = numbered(4, 128)
    for e in range(4):
        for w, shape in (("w1", (256, 128)), ("w2", (128, 256)), ("w3", (256, 128))):
            tensors[f"{moe}experts.{e}.{w}.weight"] = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            tensors[f"{moe}experts.{e}.{w}.weight_scale_inv"] = numbered(shape[0] // 128, shape[1] // 128) + e
    parts = shards(tensors, config, Sizes(tp=2))
    assert parts[0]["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 2, 1)
    assert parts[1]["model.layers.0.mlp.experts.down_proj_scale_inv"].flatten().tolist() == [1, 2, 3, 4]


# --- plans in TOML ----------------------------------------------------------------------------------------------------

FUSED = """
default = "refuse"
[[rule]]
tensor = "layers.{layer}.qkv.{weight|bias}"
kind = "fused"
parts = [
    { size = "num_attention_heads * head_dim", heads = "num_attention_heads" },
    { size = "num_key_value_heads * head_dim", kv = true },
    { size = "num_key_value_heads * head_dim", kv = true },
]
[[rule]]
tensor = "layers.{layer}.gate_up.weight"
kind = "fused"
parts = [{ size = "intermediate_size" }, { size = "intermediate_size" }]
"""


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_fused_tensor_is_split_part_by_part(tmp_path: Path, tp: int) -> None:
    tensors = {"layers.0.qkv.weight": numbered(16, 8), "layers.0.qkv.bias": numbered(16)}
    tensors["layers.0.gate_up.weight"] = numbered(32, 8)
    parts = shards(tensors, CONFIG, Sizes(tp=tp), toml(tmp_path, FUSED))
    for rank, part in enumerate(parts):
        for name in ("layers.0.qkv.weight", "layers.0.qkv.bias"):
            q, k, v = tensors[name].split([8, 4, 4])
            mine = [q.chunk(tp)[rank], *(t.chunk(min(tp, 2))[rank * min(tp, 2) // tp] for t in (k, v))]
            assert torch.equal(part[name], torch.cat(mine))
        gate, up = tensors["layers.0.gate_up.weight"].chunk(2)
        assert torch.equal(part["layers.0.gate_up.weight"], torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]))


def test_a_fused_tensor_whose_parts_are_not_its_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"size 20: its parts \[8, 4, 4\] sum to 16"):
        shards({"layers.0.qkv.weight": numbered(20, 8)}, CONFIG, Sizes(tp=2), toml(tmp_path, FUSED))


def test_a_tensor_that_no_rule_matches_is_refused_where_the_plan_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"stray matches no rule of plan .*, which has no default"):
        shards({"stray": numbered(2)}, CONFIG, Sizes(), toml(tmp_path, FUSED))


def test_an_unknown_architecture_needs_no_plan_on_one_rank_and_a_toml_plan_on_two(tmp_path: Path) -> None:
    config = {"architectures": ["NeverHeardOf"]}
    tensors = {"a.weight": numbered(4, 4), "b": numbered(), "c": torch.empty(0, 3)}
    [part] = shards(tensors, config, Sizes())
    assert part["c"].shape == (0, 3)
    assert all(torch.equal(part[n].to(tensors[n].dtype), tensors[n]) for n in tensors)
    shards(tensors, config, Sizes(dp=2))
    with pytest.raises(PlanError, match="NeverHeardOf has no built-in sharding plan") as error:
        shards(tensors, config, Sizes(tp=2))
    assert "TOML" in error.value.hint
    plan = toml(tmp_path, 'default = "replicate"\n[[rule]]\ntensor = "a.*"\nkind = "row"\n')
    parts = shards(tensors, config, Sizes(tp=2), plan)
    assert torch.equal(torch.cat([p["a.weight"] for p in parts], 1), tensors["a.weight"])


def test_two_tensors_must_not_get_one_name(tmp_path: Path) -> None:
    plan = toml(tmp_path, '[[rule]]\ntensor = "{a|b}"\nkind = "replicate"\nrename = "c"\n')
    with pytest.raises(PlanError, match="gives two tensors the name c"):
        shards({"a": numbered(2), "b": numbered(2)}, {}, Sizes(), plan)


# --- dtype and layout key ---------------------------------------------------------------------------------------------


def test_a_dtype_is_for_floating_weights_only_not_for_scales_or_quantised_ones() -> None:
    tensors = fp8(FP8) | {"model.layers.0.mlp.table": numbered(2, dtype=torch.int64)}
    model, _ = checkpoint(tensors, FP8)
    plan = {t.names[0]: t.dtype for t in shard(model, plan_for(FP8, None), Placement(Sizes(), 0), "bfloat16").tensors}
    assert plan["model.norm.weight"] == "bfloat16"
    assert plan["model.layers.0.mlp.up_proj.weight"] == "float8_e4m3fn"
    assert plan["model.layers.0.mlp.up_proj.weight_scale_inv"] == "float32"
    assert plan["model.layers.0.mlp.table"] == "int64"
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        shard(model, plan_for(FP8, None), Placement(Sizes(), 0), "float8_e4m3fn")


def key(config: dict[str, Any], sizes: Sizes, rank: int = 0, dtype: str = "auto") -> str:
    return layout_id(layout_key(config, Placement(sizes, rank), dtype, plan_for(config, None)))


def test_replicas_of_a_model_without_experts_share_a_layout_and_expert_ranks_do_not() -> None:
    assert key(CONFIG, Sizes(dp=2), 0) == key(CONFIG, Sizes(dp=2), 1) == key(CONFIG, Sizes())
    assert key(CONFIG, Sizes(dp=2, ep=2), 1) == key(CONFIG, Sizes())
    assert key(MOE, Sizes(dp=2, ep=2), 0) != key(MOE, Sizes(dp=2, ep=2), 1)


def test_everything_that_decides_about_bytes_or_use_is_in_the_layout_key() -> None:
    base = {**CONFIG, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "max_position_embeddings": 64}
    keys = {
        key(base, Sizes()),
        key(base, Sizes(), dtype="bfloat16"),
        key(base, Sizes(tp=2), 0),
        key(base, Sizes(tp=2), 1),
        key(base, Sizes(pp=2), 0),
        key({**base, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, Sizes()),
        key({**base, "max_position_embeddings": 128}, Sizes()),
        key({**base, "quantization_config": {"quant_method": "fp8"}}, Sizes()),
        key({**base, "architectures": ["Qwen3ForCausalLM"]}, Sizes()),
        layout_id(layout_key(base, Placement(Sizes(), 0), "auto", plan_for(base, Path("whole")))),
    }
    assert len(keys) == 10


def test_a_bad_dtype_is_refused_by_the_layout_key_too() -> None:
    with pytest.raises(ConfigError, match="bf16"):
        key(CONFIG, Sizes(), dtype="bf16")
