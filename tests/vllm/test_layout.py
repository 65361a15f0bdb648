# SPDX-License-Identifier: Apache-2.0
"""The layout key over vLLM's real configuration: what changes it, and what must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_every_field_that_decides_the_weights_changes_the_key_and_names_itself(
    child: Any, models: Path, copy_of: Any
) -> None:
    """One process for all cases: each argument is changed alone, and exactly the expected fields differ."""
    llama = str(models / "llama")
    base = {"model": llama, "dtype": "bfloat16", "max_model_len": 256}
    reference = child("layout", **base)

    def differing(**change: Any) -> set[str]:
        key = child("layout", **{**base, **change})
        return {f for f in reference if key[f] != reference[f]}

    cases: dict[str, tuple[dict[str, Any], set[str]]] = {
        "nothing": ({}, set()),
        "dtype": ({"dtype": "float32"}, {"dtype"}),
        "max_model_len": ({"max_model_len": 512}, {"max_model_len"}),
        "tp": ({"tensor_parallel_size": 2, "place": {"tp_rank": 1}}, {"tp_size", "tp_rank"}),
        "pp": ({"pipeline_parallel_size": 2, "place": {"pp_rank": 1}}, {"pp_size", "pp_rank"}),
        "rope": ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}}, {"rope", "extra"}),
        "kv": ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype"}),
        "overrides": ({"hf_overrides": {"num_hidden_layers": 2}}, {"extra"}),
        "environment": ({"environment": {"VLLM_CPU_MOE_PREPACK": "0"}}, {"environment"}),
        "unknown environment": ({"environment": {"VLLM_MADE_UP_KERNEL": "1"}}, {"environment"}),
        "log level": ({"environment": {"VLLM_LOGGING_LEVEL": "ERROR"}}, set()),
        "threads": ({"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0"}}, set()),
        "what vLLM sets for its workers": ({"environment": dict.fromkeys(SET_BY_VLLM, "1")}, set()),
        "scheduling": ({"max_num_seqs": 7, "gpu_memory_utilization": 0.3, "seed": 5}, set()),
        "architecture": ({"model": str(models / "qwen3")}, {"architecture", "extra"}),
        "elsewhere": ({"model": str(copy_of(models / "llama", "elsewhere"))}, set()),
        "replica": ({"place": {"dp_rank": 1}}, set()),
    }
    found = {name: differing(**change) for name, (change, _) in cases.items()}
    assert found == {name: expected for name, (_, expected) in cases.items()}
    assert reference["engine"] == "vllm" and reference["torch_version"] and reference["engine_version"]


def test_a_model_whose_towers_are_left_out_is_another_one(child: Any, models: Path) -> None:
    base = {"model": str(models / "idefics3"), "dtype": "bfloat16", "max_model_len": 256}
    extra = {n: child("layout", **base, limit_mm_per_prompt={"image": n})["extra"] for n in (0, 1, 2)}
    assert extra[1] == extra[2] and extra[0]["multimodal"] == {**extra[1]["multimodal"], "off": ["image"]}


# Workers have these and a preload has not.
SET_BY_VLLM = ("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "VLLM_DIST_IDENT", "VLLM_WORKER_MULTIPROC_METHOD",
               "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_CUSTOM_ALLREDUCE_ALGO", "VLLM_USE_AOT_COMPILE")  # fmt: skip


def test_data_parallel_ranks_differ_only_where_there_are_experts(child: Any, models: Path) -> None:
    code = """
from types import SimpleNamespace as N
from wcache.engine.vllm.layout import Place, experts
parallel = N(data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel={ep})
result = [experts(N(is_moe={moe}), parallel, Place(tp, 0, dp)) for dp in (0, 1) for tp in (0, 1)]
"""
    assert child("evaluate", code=code.format(moe=False, ep=True)) == [[1, 0, 1, 0]] * 4
    assert child("evaluate", code=code.format(moe=True, ep=False)) == [
        [2, 0, 1, 0],
        [2, 0, 1, 0],
        [2, 1, 1, 0],
        [2, 1, 1, 0],
    ]
    assert child("evaluate", code=code.format(moe=True, ep=True)) == [
        [2, 0, 4, 0],
        [2, 0, 4, 1],
        [2, 1, 4, 2],
        [2, 1, 4, 3],
    ]


def test_a_value_without_a_canonical_form_is_an_error_and_not_a_constant(child: Any) -> None:
    code = """
from wcache.engine.vllm.layout import plain
from wcache.errors import FingerprintError
try:
    plain({"a": [1, object()]}, "extra.x")
except FingerprintError as e:
    result = str(e)
"""
    assert "extra.x.a[1]: a builtins.object" in child("evaluate", code=code)
