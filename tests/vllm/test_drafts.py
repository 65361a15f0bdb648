# SPDX-License-Identifier: Apache-2.0
"""Draft models: a shard of their own beside the target's, the same proposals from disk, cold, warm and copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inotify import opened
from tiny_checkpoints import settle, zero
from vllm_lines import MAPPED, mapped, unusable

from wcache.engine.vllm.parity import differences

# method: the target, the draft's directory (None: in the target's checkpoint), tokens to propose
METHODS = {
    "draft_model": ("llama", "draft", 3),
    "eagle": ("llama", "eagle", 2),
    "eagle3": ("llama", "eagle3", 2),
    "mtp": ("ernie", None, 1),
}


def speculative(models: Path, method: str, **more: Any) -> dict[str, Any]:
    _, draft, count = METHODS[method]
    where = {} if draft is None else {"model": str(models / draft)}
    return {"method": method, "num_speculative_tokens": count, **where, **more}


class Starts:
    """Engines with a draft, one after the other, and what each of them had."""

    def __init__(self, child: Any, model: Path, config: dict[str, Any]) -> None:
        self.child, self.seen = child, {}
        self.options = {"model": str(model), "speculative_config": config, "disable_log_stats": False}

    def __call__(self, how: str, extra: dict[str, Any], *, stop: bool = True) -> list[str]:
        began = self.child("start", name=how, extra=extra, **self.options)
        states = [self.child("state", name=how, draft=draft) for draft in (False, True)]
        self.seen[how] = (began["tokens"], self.child("drafted", name=how), states)
        if stop:
            self.child("stop", name=how)
        return [*mapped(began["log"]), *unusable(began["log"])]


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_has_its_own_shard_and_proposes_the_same_from_disk_cold_warm_and_copied(
    method: str, models: Path, daemons: Any, child: Any
) -> None:
    """Tokens, proposals and all tensors agree, those that vLLM takes from the target after the load among them."""
    daemon = daemons()
    start = Starts(child, models / METHODS[method][0], speculative(models, method))
    assert ["(no_daemon: " in line for line in start("disk", daemon.extra(socket_dir="/nowhere"))] == [True, True]
    target, draft = start("cold", daemon.extra())
    assert "(empty: " in target and "(layout: " in draft
    shards = {s.layout.role: s for s in daemon.status().shards}
    assert set(shards) == {"target", "draft"}
    assert (shards["draft"].content == shards["target"].content) is (method == "mtp")
    said = start("warm", daemon.extra(fallback=False), stop=False)
    held = [child("holds", name="warm", draft=draft) for draft in (False, True)]
    assert said == [MAPPED.format(h["tensors"], "zero_copy") for h in held] and {h["lease"] for h in held} == {"held"}
    assert [len(s.leases) for s in daemon.status().shards] == [1, 1]
    child("stop", name="warm")
    assert [line.startswith("Mapped ") for line in start("copied", daemon.extra(fallback=False, mode="copy"))] == [
        True
    ] * 2
    assert daemon.wait(lambda s: not s.shards).shards == ()
    tokens, drafted, states = start.seen.pop("disk")
    assert drafted[0] > 0, "nothing was proposed"
    for how, found in start.seen.items():
        assert found[:2] == (tokens, drafted), how
        assert [differences(*pair) for pair in zip(states, found[2], strict=True)] == [[], []], how


def preloading(models: Path, method: str, **more: Any) -> str:
    """A rank's configuration that names a target and its draft."""
    inline = ", ".join(f"{k} = {json.dumps(v)}" for k, v in speculative(models, method, **more).items())
    return f'''model = "{models / METHODS[method][0]}"
loader = "vllm"
dtype = "bfloat16"
engine_args = {{ max_model_len = 256, speculative_config = {{ {inline} }} }}
'''


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_preload_brings_the_draft_along(method: str, models: Path, daemons: Any, child: Any) -> None:
    """When the rank is ready both are there, and they are what an engine would have published."""
    daemon = daemons(0, preloading(models, method))
    shards = daemon.wait(lambda s: s.state == "ready", 120).shards
    assert {(s.layout.role, s.origin) for s in shards} == {("target", "preload"), ("draft", "engine")}
    start = Starts(child, models / METHODS[method][0], speculative(models, method))
    assert [line.startswith("Mapped ") for line in start("warm", daemon.extra(fallback=False))] == [True, True]
    start("disk", daemon.extra(socket_dir="/nowhere"))
    (tokens, drafted, states), (tokens_of_disk, drafted_of_disk, disk) = start.seen["warm"], start.seen["disk"]
    assert (tokens, drafted) == (tokens_of_disk, drafted_of_disk) and drafted[0] > 0
    assert [differences(*pair) for pair in zip(disk, states, strict=True)] == [[], []]


def test_a_draft_that_cannot_be_preloaded_is_named_and_the_target_is_ready(
    models: Path, daemons: Any, copy_of: Any
) -> None:
    broken = copy_of(models / "draft", "broken")
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    daemon = daemons(0, preloading(models, "draft_model", model=str(broken)))
    assert [s.layout.role for s in daemon.wait(lambda s: s.state == "ready", 120).shards] == ["target"]
    said = daemon.log.read_text()
    assert "the draft is not preloaded: " in said and weights.name in said


def test_a_warm_start_with_a_draft_opens_no_checkpoint_file(models: Path, daemons: Any, child: Any) -> None:
    daemon = daemons()
    options = {"model": str(models / "llama"), "speculative_config": speculative(models, "eagle")}
    child("start", name="cold", extra=daemon.extra(), **options)
    settle(models / "llama")
    settle(models / "eagle")
    child("start", name="known", extra=daemon.extra(), **options)  # what was too new to be remembered is hashed again
    with opened(models / "llama") as target, opened(models / "eagle") as draft:
        child("start", name="warm", extra=daemon.extra(fallback=False), **options)
    assert [n for n in [*target, *draft] if n.endswith(".safetensors")] == []
    assert "config.json" in draft, "nothing was watched"


def test_a_draft_that_draws_on_the_targets_own_checkpoint_is_a_shard_of_its_own(
    models: Path, daemons: Any, child: Any
) -> None:
    """A model that is its own draft is right every time; the two shards have the same content and different keys."""
    daemon, config = daemons(), {"method": "draft_model", "model": str(models / "llama"), "num_speculative_tokens": 2}
    start = Starts(child, models / "llama", config)
    start("cold", daemon.extra())
    assert len({s.content for s in daemon.status().shards}) == 1 and len(daemon.status().shards) == 2
    assert len(start("warm", daemon.extra(fallback=False))) == 2
    (tokens, (proposed, right), _), warm = start.seen["cold"], start.seen["warm"]
    assert warm[:2] == (tokens, [proposed, right]) and right > proposed / 2


def test_target_and_draft_hit_or_miss_each_by_itself(
    models: Path, daemons: Any, child: Any, engines: Any, copy_of: Any
) -> None:
    """Another draft beside the same target is loaded and published; an engine without a draft has the same target."""
    daemon, twin = daemons(), copy_of(models / "draft", "twin")
    zero(twin, "model.norm.weight")
    start = Starts(child, models / "llama", speculative(models, "draft_model"))
    start("cold", daemon.extra(), stop=False)
    counted = sum(s.segment_bytes for s in daemon.status().shards)
    assert child("external", name="cold", extra=daemon.extra()) == counted, "both, to the byte"
    other = speculative(models, "draft_model", model=str(twin))
    began = child("start", name="other", extra=daemon.extra(), model=str(models / "llama"), speculative_config=other)
    assert len(mapped(began["log"])) == 1 and "(checkpoint_content: " in unusable(began["log"])[0]
    assert began["tokens"] == start.seen["cold"][0], "greedy answers are the target's, whatever a draft proposes"
    assert sorted(s.layout.role for s in daemon.status().shards) == ["draft", "draft", "target"]
    alone = child("start", name="alone", extra=daemon.extra(fallback=False), model=str(models / "llama"))
    assert len(mapped(alone["log"])) == 1
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    # in a process of its own: after numba, which n-grams import, vLLM 0.32 starts no second engine in one
    without = engines(daemon)("start", name="ngrams", extra=daemon.extra(fallback=False), model=str(models / "llama"),
                              speculative_config=ngrams)  # fmt: skip
    assert len(mapped(without["log"])) == 1 and without["tokens"] == alone["tokens"]


def test_what_decides_a_drafts_weights_is_in_its_key_and_what_is_not_tried_is_refused(
    models: Path, child: Any, copy_of: Any
) -> None:
    config = {"model": str(models / "llama"), "dtype": "bfloat16", "max_model_len": 256}

    def asked(method: str, change: str = "", **more: Any) -> Any:
        target = str(models / METHODS[method][0])
        arguments = {**config, "model": target, "speculative_config": speculative(models, method, **more)}
        return child("evaluate", code=ASK.format(arguments=arguments, change=change))

    keys = {method: asked(method) for method in METHODS}
    assert {k["role"] for k in keys.values()} == {"draft"}
    assert [k["extra"]["draft"]["method"] for k in keys.values()] == list(METHODS)
    assert asked("draft_model") == keys["draft_model"] != asked("draft_model", moe_backend="triton")
    again = asked("draft_model", model=str(copy_of(models / "draft", "elsewhere")), num_speculative_tokens=1)
    assert again == keys["draft_model"], "where the draft is and how much it proposes decides nothing"
    untried = asked("draft_model", "made.speculative_config.method = 'medusa'")
    assert untried == "unsupported: drafts of the method medusa have not been tried"
    staged = asked("draft_model", "made.parallel_config.pipeline_parallel_size = 2")
    assert staged == "unsupported: a draft beside a pipeline is loaded by its last stage alone"


ASK = """
from vllm.engine.arg_utils import EngineArgs
from wcache.engine.vllm import support
from wcache.engine.vllm.layout import Place, layout_key
from wcache.errors import Miss
made = EngineArgs(**{arguments!r}).create_engine_config()
{change}
draft = made.speculative_config.draft_model_config
try:
    support.check(made, draft)
    result = layout_key(made, draft, Place()).fields()
except Miss as e:
    result = f"{{e.reason}}: {{e}}"
"""


def test_the_drafts_of_two_tensor_parallel_ranks_are_attached_together(
    models: Path, daemons: Any, engines: Any
) -> None:
    ranks = [daemons(r, "ranks = [0, 1]\n[parallel]\ntp_size = 2\n") for r in (0, 1)]
    child = engines(ranks[0], VLLM_CPU_OMP_THREADS_BIND="0|1")
    options = {"model": str(models / "llama"), "speculative_config": speculative(models, "eagle"),
               "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}  # fmt: skip
    cold = child("start", name="cold", **options)["tokens"]
    child("stop", name="cold")
    assert [sorted((s.layout.role, s.layout.tp_rank) for s in r.status().shards) for r in ranks] == [
        [("draft", 0), ("target", 0)],
        [("draft", 1), ("target", 1)],
    ]
    warm = child("start", name="warm", extra={"fallback": False}, **options)["tokens"]
    child("stop", name="warm")
    assert warm == cold
    assert child.log.read_text().count("Mapped ") == 4
