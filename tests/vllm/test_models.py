# SPDX-License-Identifier: Apache-2.0
"""Models that do more than hold weights: that compute while they are built, pack weights or drop modules while loading,
leave a part out, or cannot be shared. An engine that attaches one is the engine that loaded it, or says why not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_lines import mapped, unusable

from wcache.engine.vllm.parity import differences

RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["a", "b"],
    "is_original_qwen3_reranker": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "bloom": {},  # its constructor computes with slopes
    "nemotron-h": {},  # the weights of short convolutions are packed, on processors that have bfloat16
    "phi": {},  # run by vLLM over Transformers' own code; its head has a bias that vLLM's layer does not have at first
    "idefics3": {"limit_mm_per_prompt": {"image": 1}},  # has a tower for images
    "qwen3": {"runner": "pooling", "convert": "embed"},  # a generating model as an embedder: without its head
    "qwen3, reranker": {"runner": "pooling", "hf_overrides": RERANKER},  # has a head only while it is being loaded
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, models: Path, daemons: Any, child: Any) -> None:
    """Cold against warm: every tensor, every attribute, and the answers."""
    daemon, seen = daemons(), {}
    options = {"model": str(models / case.partition(",")[0]), **CASES[case]}
    for how, extra in (("cold", {}), ("warm", {"fallback": False})):
        seen[how] = child("start", name=how, **options, extra=daemon.extra(**extra)), child("state", name=how)
        child("stop", name=how)
    assert len(unusable(seen["cold"][0]["log"])) == 1 and len(mapped(seen["warm"][0]["log"])) == 1
    assert differences(seen["cold"][1], seen["warm"][1]) == []
    assert seen["warm"][1]["keys"] == seen["cold"][1]["keys"]
    assert seen["warm"][0]["tokens"] == seen["cold"][0]["tokens"]


def test_an_embedder_whose_projection_differs_is_another_model(
    models: Path, daemons: Any, child: Any, copy_of: Any
) -> None:
    """Sentence Transformers keeps it in a folder of its own, beside the same checkpoint files."""
    daemon, seen = daemons(), {}
    made = {
        name: with_projection(copy_of(models / "qwen3", name), seed) for seed, name in enumerate(("first", "second"))
    }
    for name, more in (("first", {}), ("second", {}), ("first", {"fallback": False})):
        began = child("start", name=name, model=str(made[name]), **CASES["qwen3"], extra=daemon.extra(**more))
        child("stop", name=name)
        assert len(mapped(began["log"])) == len(more)
        assert seen.setdefault(name, began["tokens"]) == began["tokens"]
    assert seen["first"] != seen["second"] and len(daemon.status().shards) == 2


def with_projection(directory: Path, seed: int) -> Path:
    """Add a dense layer after the pooling."""
    source = torch.Generator().manual_seed(seed)
    folder, kind = directory / "2_Dense", "sentence_transformers.models.Dense"
    folder.mkdir()
    save_file({"linear.weight": torch.randn(16, 128, generator=source)}, folder / "model.safetensors")
    config = {"in_features": 128, "out_features": 16, "bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    (directory / "modules.json").write_text(json.dumps([{"idx": 2, "name": "2", "path": "2_Dense", "type": kind}]))
    return directory


@pytest.fixture
def built(child: Any) -> Any:
    """Have the constructor of vLLM's Llama do something more."""

    def patch(code: str) -> None:
        child("evaluate", code=PATCH.format(code=code))

    yield patch
    child("evaluate", code=f"{LLAMA}\nLlamaForCausalLM.__init__ = LlamaForCausalLM.__init__.__wrapped__")


LLAMA = "from vllm.model_executor.models.llama import LlamaForCausalLM"
PATCH = f"""
import functools
import torch
{LLAMA}
original = LlamaForCausalLM.__init__
@functools.wraps(original)
def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    {{code}}
init.__globals__.update(original=original, torch=torch)
LlamaForCausalLM.__init__ = init
"""


CONSTRUCTORS = {
    "a device that a model notes is where its weights will be": "self.home = self.lm_head.weight.device",
    "weights are moved before they are there": "self.lm_head.to('cpu', dtype=torch.bfloat16); self.lm_head.cpu()",
    "what is noted on a buffer stays": "self.mark = torch.nn.Buffer(torch.ones(3))",
    "the configuration is written, once for each model": (
        "c = kwargs['vllm_config'].model_config.hf_config; c.models = getattr(c, 'models', []) + [1]; "
        "self.models = len(c.models)"
    ),
}


def test_what_constructors_do_besides_making_weights_comes_out_the_same(
    models: Path, daemons: Any, child: Any, built: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    built("; ".join(CONSTRUCTORS.values()))
    began = child("start", name="cold", model=model, extra=daemon.extra())
    assert not [line for line in began["log"] if "not published" in line]
    child("start", name="warm", model=model, extra=daemon.extra(fallback=False))
    assert differences(child("state", name="cold"), child("state", name="warm")) == []
    assert child("evaluate", code="m = child._model('warm'); result = [str(m.home), m.models]") == ["cpu", 1]


def test_a_tensor_as_large_as_the_engine_wants_it_is_not_taken_from_another_engine(
    models: Path, daemons: Any, child: Any, built: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    built("self.scratch = torch.zeros(kwargs['vllm_config'].scheduler_config.max_num_batched_tokens, device='cpu')")
    for name, tokens in (("cold", 300), ("warm", 300), ("wide", 400)):
        began = child("start", name=name, model=model, max_num_batched_tokens=tokens, extra=daemon.extra())
        assert len(mapped(began["log"])) == (name == "warm")
        assert child("evaluate", code=f"result = len(child._model({name!r}).scratch)") == tokens
    assert "scratch: bfloat16 (300,) where it was loaded, bfloat16 (400,) here" in unusable(began["log"])[0]


def test_a_file_that_a_model_reads_beside_its_checkpoint_decides_as_well(
    models: Path, daemons: Any, child: Any, built: Any, copy_of: Any
) -> None:
    daemon = daemons()
    built("f = kwargs['vllm_config'].model_config.model + '/codec/scale'; self.lm_head.scale = float(open(f).read())")
    for name, scale, lines in (("one", 1, 0), ("same", 1, 1), ("other", 2, 0)):
        directory = copy_of(models / "llama", name)
        (directory / "codec").mkdir()
        (directory / "codec" / "scale").write_text(str(scale))
        began = child("start", name=name, model=str(directory), extra=daemon.extra())
        assert len(mapped(began["log"])) == lines, name
        assert child("evaluate", code=f"result = child._model({name!r}).lm_head.scale") == scale
    assert "(checkpoint_content: the model reads codec/scale as well" in unusable(began["log"])[0]


REFUSED = {
    "self.total = self.lm_head.weight.sum().item()": "vLLM cannot build this model without its weights: ",
    "self.kind = dict if self.lm_head.weight.is_meta else list": (
        "vLLM builds this model otherwise without its weights: kind (class builtins.list)"
    ),
    "two = torch.ones(2); self.two = lambda: two": "two.two is a tensor where it cannot be put back",
}


@pytest.mark.parametrize("code", REFUSED)
def test_a_model_that_depends_on_its_weights_while_it_is_built_is_not_published_and_says_why(
    code: str, models: Path, daemons: Any, child: Any, built: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    built(code)
    began = child("start", name="cold", model=model, extra=daemon.extra())
    [said] = [line for line in began["log"] if REFUSED[code] in line]
    assert said.startswith(("Weight cache unusable (unsupported: ", "wcache: not published: "))
    assert daemon.status().shards == ()
    assert began["tokens"] == child("start", name="plain", model=model, load_format="auto")["tokens"]
