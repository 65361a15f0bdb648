# SPDX-License-Identifier: Apache-2.0
"""The language of plans, and the packaged plans against what Transformers really builds and writes."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import PlanError
from wcache.model import Placement, Sizes
from wcache.weights.checkpoint import open_checkpoint, survey
from wcache.weights.expression import choices, pattern, size
from wcache.weights.load import Filled, load
from wcache.weights.plan import packaged, plan_for
from wcache.weights.segment_host import HostBackend
from wcache.weights.sharding import shard

# --- the language -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "numbers"),
    [
        ("a.{layer}.b", "a.12.b", {"layer": 12}),
        ("a.{layer}.b", "a.x.b", None),
        ("a.{layer}.b", "a.1.b.c", None),
        ("a.{q|k}_proj.*", "a.k_proj.weight.inner", {}),
        ("a.{q|k}_proj.*", "a.v_proj.weight", None),
        ("{layer}.{expert}", "3.4", {"layer": 3, "expert": 4}),
        ("a+b.c", "a+b.c", {}),
        ("a.b", "aXb", None),
    ],
)
def test_a_pattern_matches_whole_names_and_remembers_numbers(
    text: str, name: str, numbers: dict[str, int] | None
) -> None:
    assert pattern(text).match(name) == numbers


@pytest.mark.parametrize("text", ["a.{layers}", "a.{layer}.{layer}", "a.{", "a}"])
def test_a_pattern_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="pattern"):
        pattern(text)


def test_choices_are_written_out() -> None:
    assert list(choices("{a|b}.{layer}.{c|d}")) == ["a.{layer}.c", "a.{layer}.d", "b.{layer}.c", "b.{layer}.d"]


@given(a=st.integers(1, 99), b=st.integers(1, 99))
def test_a_size_is_computed_from_the_configuration(a: int, b: int) -> None:
    config = {"a": a, "text_config": {"b": b}, "hidden_size": a * b, "num_attention_heads": b}
    assert size("(a + b) * 2 // 1", config) == (a + b) * 2
    assert size("nothing | a", config) == a
    assert size("head_dim * num_key_value_heads", config) == a * b


@pytest.mark.parametrize(
    "text", ["a - 7", "missing", "a // 0", "a / 2", "f(a)", "a.b", "'x'", "a +", "a ** 9", "1.5", ""]
)
def test_a_size_that_is_no_positive_whole_number_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        size(text, {"a": 7})


def test_a_key_of_the_configuration_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="a in config.json is '7', no whole number"):  # noqa: RUF043
        size("a", {"a": "7"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('defualt = "whole"', ["unknown key defualt", "did you mean default?"]),
        ('[[rule]]\ntensor = "a"\nkind = "row"\nhead = "a"', ["unknown key rule[0].head", "rule[0].heads"]),
        ('[[rule]]\ntensor = "a"\nkind = "fused"\nparts = [{siez = "a"}]', ["rule[0].parts[0].siez", "size"]),
        ('[[rule]]\ntensor = "a"\nkind = "rows"', ["rows"]),
        ('[[rule]]\nkind = "row"', ["tensor"]),
        ('[[rule]]\ntensor = "a"\nkind = "fused"', ["parts"]),
        ('[[rule]]\ntensor = "a"\nkind = "vocab"\nheads = "b"', ["heads do not apply"]),
        ('[[rule]]\ntensor = "a"\nkind = "row"\ndim = -1', ["dim -1"]),
        ('[[rule]]\ntensor = "a.{layer}"\nkind = "row"\nstage = "last"', ["stage does not apply"]),
        ('[[rule]]\ntensor = "a"\nkind = "row"\nrename = "b.{layer}"', ["rename 'b.{layer}'"]),
        ('[[rule]]\ntensor = "a"\nkind = "row"\nstack = { into = "b" }', ["stack collects over {expert}"]),
        ('[[rule]]\ntensor = "a.{expert}"\nkind = "row"\nstack = { into = "b", part = 2, parts = 2 }', ["part 2 of 2"]),
        ('experts = "exec(1)"', ["exec"]),
        ('extends = "lama"', ["extends 'lama'", "llama"]),
        ("default = ", ["plan.toml"]),
    ],
)
def test_a_mistake_in_a_plan_is_an_error_that_names_it(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        plan_for({}, path)
    for word in words:
        assert word in str(error.value)


def test_a_plan_that_is_not_there_is_an_error_that_names_the_packaged_ones(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file") as error:
        plan_for({}, tmp_path / "none.toml")
    assert "llama" in error.value.hint


def test_a_plan_that_extends_a_packaged_one_puts_its_rules_first(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('extends = "llama"\n[[rule]]\ntensor = "model.norm.weight"\nkind = "column"\n')
    plan, base = plan_for({}, path), plan_for({}, Path("llama"))
    rule, _ = plan.rule_for("model.norm.weight")
    assert rule is not None
    assert rule.text.split == "column"
    assert plan.rules[1:] == base.rules
    assert plan.required == base.required
    assert plan.digest != base.digest


def test_the_digest_is_of_what_a_plan_does_not_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('extends = "llama"\n')
    mine, base = plan_for({}, path), plan_for({}, Path("llama"))
    assert mine.digest == base.digest
    others = [
        replace(base, rules=base.rules[::-1]), replace(base, default="refuse"), replace(base, layers="n"),
        replace(base, experts="n"), replace(base, tied=()),
    ]  # fmt: skip
    assert len({base.digest, *(p.digest for p in others)}) == 6


def test_every_packaged_plan_is_well_formed_and_no_architecture_has_two() -> None:
    seen: list[str] = []
    for name, text in packaged().items():
        plan_for({}, Path(name))
        seen += text.architectures
    assert len(seen) == len(set(seen)) == 7


# --- the packaged plans -----------------------------------------------------------------------------------------------

BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "mlp_only_layers": [0]},
}
ROW = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
COLUMN = ("q_proj.", "gate_proj.", "up_proj.", "embed_tokens.", "lm_head.")


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny model of Transformers, and the checkpoint that Transformers wrote of it."""
    import transformers

    config = getattr(transformers, f"{request.param}Config")(**BASE, **MODELS[request.param], dtype="bfloat16")
    torch.manual_seed(0)
    kind = getattr(transformers, f"{request.param}ForCausalLM")
    model = kind(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path, max_shard_size="20KB")
    return model, path


def contents(filled: Filled) -> dict[str, torch.Tensor]:
    found = {}
    for spec in filled.tensors:
        storage = filled.storages[spec.storage]
        memory = filled.segments[storage.segment].memory()
        assert isinstance(memory, mmap.mmap)
        raw = bytearray(memory[storage.offset : storage.offset + storage.size])
        tensor = torch.frombuffer(raw, dtype=getattr(torch, spec.dtype)).reshape(spec.shape)
        found |= dict.fromkeys(spec.names, tensor)
    return found


def shards(path: Path, sizes: Sizes) -> list[dict[str, torch.Tensor]]:
    model = open_checkpoint(survey(path))
    plan, found = plan_for(model.survey.config, None), []
    for rank in range(sizes.world):
        filled = load(model, shard(model, plan, Placement(sizes, rank)), HostBackend())
        found.append(contents(filled))
        filled.close()
    return found


def test_one_rank_gets_the_names_shapes_dtypes_and_bytes_of_the_module(built: tuple[Any, Path]) -> None:
    model, path = built
    with torch.device("meta"):
        skeleton = type(model)(model.config).to(torch.bfloat16).state_dict()
    [part] = shards(path, Sizes())
    assert {n: (t.shape, t.dtype) for n, t in part.items()} == {n: (t.shape, t.dtype) for n, t in skeleton.items()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(part[name], tensor), name
    if model.config.tie_word_embeddings:
        assert part["lm_head.weight"] is part["model.embed_tokens.weight"]


@pytest.mark.parametrize("tp", [2, 4])
def test_the_ranks_of_a_group_together_hold_the_module(built: tuple[Any, Path], tp: int) -> None:
    model, path = built
    parts = shards(path, Sizes(tp=tp))
    for name, whole in model.state_dict().items():
        mine = [part[name] for part in parts]
        if name.endswith("gate_up_proj"):
            halves = [m.chunk(2, 1) for m in mine]
            joined = torch.cat([torch.cat([h[i] for h in halves], 1) for i in (0, 1)], 1)
        elif name.endswith(ROW):
            joined = torch.cat(mine, -1)
        elif "k_proj" in name or "v_proj" in name:
            joined = torch.cat(mine[:: tp // 2])
        elif any(word in name for word in COLUMN):
            joined = torch.cat(mine)
        else:
            assert all(torch.equal(m, mine[0]) for m in mine), name
            joined = mine[0]
        assert torch.equal(joined, whole), name


@pytest.mark.parametrize("sizes", [Sizes(pp=2), Sizes(tp=2, pp=2), Sizes(tp=2, ep=2)])
def test_no_tensor_of_the_module_is_on_no_rank(built: tuple[Any, Path], sizes: Sizes) -> None:
    model, path = built
    parts = shards(path, sizes)
    assert set().union(*parts) == set(model.state_dict())
    if sizes.pp > 1:
        assert not [n for n in parts[0] if "layers.1." in n or n == "model.norm.weight"]
