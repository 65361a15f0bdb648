# SPDX-License-Identifier: Apache-2.0
"""vLLM's features that write into weights, move them or wrap them: each is shared, or falls back and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_lines import mapped, unusable

LORA = {"enable_lora": True, "max_lora_rank": 8}

# Feature: the engine's arguments, what is set afterwards where this platform lets nobody ask for it, the reason.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "sleep": ({}, "model_config.enable_sleep_mode", "sleep mode moves the weights"),
    "cumem": ({}, "model_config.enable_cumem_allocator", "the cumem allocator owns the weights"),
    "eplb": (
        {"model": "qwen3-moe", "tensor_parallel_size": 2, "enable_expert_parallel": True},
        "parallel_config.enable_eplb",
        "EPLB rearranges experts in place",
    ),
    "elastic EP": ({"model": "qwen3-moe"}, "parallel_config.enable_elastic_ep", "elastic EP moves experts"),
    "weight transfer": (
        {"weight_transfer_config": {"backend": "ipc"}}, "", "weight transfer writes into the weights",
    ),
    "offloading": ({"cpu_offload_gb": 1}, "", "CPU offloading moves the weights"),
    "prefetching": ({"offload_group_size": 2}, "", "weight prefetching moves the weights"),
    "online quantization": ({"quantization": "fp8"}, "", "online quantization makes weights while loading"),
    "torchao": ({}, "model_config.quantization=torchao", "torchao weights are tensor subclasses"),
    "another device": ({"load_device": "meta"}, "", "the weights go to another device than the engine's"),
}  # fmt: skip

ASK = """
from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from wcache.engine.vllm import support
from wcache.errors import Miss
arguments = {arguments!r}
device = arguments.pop("load_device", None)
made = EngineArgs(**arguments).create_engine_config()
made.load_config.device = device
path, _, value = {flag!r}.partition("=")
section, _, flag = path.rpartition(".")
if flag:
    before = getattr(getattr(made, section), flag)
    assert before in (False, None), before
    setattr(getattr(made, section), flag, value or True)
try:
    support.check(made, made.model_config)
    result = "nothing"
except Miss as e:
    result = [str(e.reason), str(e)]
"""


@pytest.mark.parametrize("feature", REFUSED)
def test_a_feature_that_is_refused_says_why(feature: str, models: Path, child: Any) -> None:
    arguments, flag, why = REFUSED[feature]
    base = {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True}
    arguments = {**base, **arguments, "model": str(models / arguments.get("model", "llama"))}
    assert child("evaluate", code=ASK.format(arguments=arguments, flag=flag)) == ["unsupported", why]
    plain = {**base, "model": arguments["model"]}
    assert child("evaluate", code=ASK.format(arguments=plain, flag="")) == "nothing"


def test_a_refusal_is_the_reason_in_the_log_and_the_engine_has_weights_of_its_own(
    models: Path, daemons: Any, child: Any
) -> None:
    """The trainer's transfer then writes into this engine, and only into it."""
    daemon, model = daemons(), str(models / "llama")
    child("evaluate", code=REGISTER_TRANSFER)
    before = child("start", name="cold", model=model, extra=daemon.extra())["tokens"]
    transfer = {"weight_transfer_config": {"backend": "zeroing"}, "extra": daemon.extra()}
    began = child("start", name="updated", model=model, **transfer)
    assert unusable(began["log"]) == [
        "Weight cache unusable (unsupported: weight transfer writes into the weights); falling back to disk loading"
    ]
    assert began["tokens"] == before
    words = child.failing("start", name="l", model=model, **{**transfer, "extra": daemon.extra(fallback=False)})
    assert "weight transfer writes into the weights" in words
    info = {"names": ["model.norm.weight"]}
    for call in ("'start_weight_update'", f"'update_weights', args=({info},)", "'finish_weight_update'"):
        child("evaluate", code=f"child.engines['updated'].collective_rpc({call})")
    assert child("tokens", name="updated") != before
    assert list(daemon.verify().values()) == [True]
    later = child("start", name="later", model=model, extra=daemon.extra(fallback=False))
    assert later["tokens"] == before and len(mapped(later["log"])) == 1


REGISTER_TRANSFER = """
import sys, types
from dataclasses import dataclass, field
import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

@dataclass
class Init(base.WeightTransferInitInfo):
    pass

@dataclass
class Update(base.WeightTransferUpdateInfo):
    names: list = field(default_factory=list)

class Zeroing(base.WeightTransferEngine):
    init_info_cls, update_info_cls = Init, Update
    def init_transfer_engine(self, info): pass
    def start_weight_update(self): pass
    def finish_weight_update(self): pass
    def receive_weights(self, info, load): pass
    def update_weights(self, info):
        weights = dict(self.model.named_parameters())
        self.model.load_weights([(n, torch.zeros_like(weights[n].data)) for n in info["names"]])
    def shutdown(self): pass
    @staticmethod
    def trainer_send_weights(*args, **kwargs): pass

module = types.ModuleType("zeroing_transfer")
module.Zeroing = Zeroing
sys.modules["zeroing_transfer"] = module
WeightTransferEngineFactory.register_engine("zeroing", "zeroing_transfer", "Zeroing")
"""


def test_lora_works_over_shared_weights_which_are_those_without_it(models: Path, daemons: Any, child: Any) -> None:
    """With an adapter, cold and warm engines have the disk engine's tokens; the shard serves those without it too."""
    daemon, model, adapter = daemons(), str(models / "llama"), str(models / "lora")

    def start(how: str, **more: Any) -> list[str]:
        return list(child("start", name=how, model=model, **more)["log"])

    start("disk", **LORA, extra=daemon.extra(socket_dir="/nowhere"))
    plain, adapted = child("tokens", name="disk"), child("tokens", name="disk", adapter=adapter)
    assert plain != adapted
    start("cold", **LORA, extra=daemon.extra())
    for name, options in (("warm", LORA), ("without", {})):
        assert len(mapped(start(name, **options, extra=daemon.extra(fallback=False)))) == 1
    [shard] = daemon.status().shards
    assert len(shard.leases) == 3
    for name in ("cold", "warm"):
        assert child("tokens", name=name, adapter=adapter) == adapted
        assert child("tokens", name=name) == plain, "without the adapter it is the base model"
    assert child("tokens", name="without") == plain
    assert list(daemon.verify().values()) == [True]


def test_lora_is_in_the_key_where_it_decides_kernels(models: Path, child: Any) -> None:
    for name, expected in (("llama", False), ("qwen3", False), ("mixtral", True)):
        base = {"model": str(models / name), "dtype": "bfloat16", "max_model_len": 256}
        assert (child("layout", **base) != child("layout", **base, enable_lora=True)) is expected, name
