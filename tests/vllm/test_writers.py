# SPDX-License-Identifier: Apache-2.0
"""Everything in vLLM that writes into weights in place, tried against mapped ones.

Where vLLM has a call for it the engine refuses and says what to do instead. What writes past every call changes that
engine alone on a CPU (its pages are private; a GPU's mapping is read-only, see tests/gpu). In no case does the shard
change, or an engine that comes later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_checkpoints import zero
from vllm_lines import mapped

from wcache.engine.vllm.parity import differences

WAY_OUT = 'shared and read-only; an engine started with model_loader_extra_config {"mode": "copy"}'

PRELUDE = """
import torch
llm = child.engines["warm"]
worker = llm.llm_engine.model_executor.driver_worker.worker
runner, model = worker.model_runner, child._model("warm")
weights = dict(model.named_parameters())
zeros = lambda: iter([(n, torch.zeros_like(p)) for n, p in weights.items()])
"""

# What a caller of vLLM may ask for.
REFUSED = {
    "reload from disk": 'llm.collective_rpc("reload_weights")',
    "reload from another directory": 'llm.collective_rpc("reload_weights", kwargs={"weights_path": twin})',
    "reload from a trainer": 'llm.collective_rpc("reload_weights", kwargs={"weights_iterator": zeros()})',
    "reload in kernel format": """
llm.collective_rpc("reload_weights", kwargs={"weights_iterator": zeros(), "is_checkpoint_format": False})""",
    "reload by the runner": "runner.reload_weights(weights_iterator=zeros())",
    "the weight checker's reset": 'llm.collective_rpc("reset_weights")',
    "a trainer's own load": 'model.load_weights([("model.norm.weight", torch.zeros(128))])',
    "the loader's load in place": """
from vllm.model_executor.model_loader import get_model_loader
get_model_loader(worker.vllm_config.load_config).load_weights(model, worker.model_config)""",
    "reload under another load format": """
llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto", "model_loader_extra_config": {}}},))
llm.collective_rpc("reload_weights")""",
}

# What writes without asking, and the tensor it writes.
RAW = {
    "copy_": ("model.norm.weight", "w.data.copy_(torch.zeros(128))"),
    "zero_": ("model.layers.0.input_layernorm.weight", "w.data.zero_()"),
    "replace_parameter": (
        "model.layers.1.input_layernorm.weight",
        """
import inspect
from vllm.model_executor.utils import replace_parameter
prefer = {"prefer_copy": True} if "prefer_copy" in inspect.signature(replace_parameter).parameters else {}
before = w.data_ptr()
replace_parameter(model.model.layers[1].input_layernorm, "weight", torch.zeros_like(w.data), **prefer)
assert model.model.layers[1].input_layernorm.weight.data_ptr() == before, "it was not written in place\"""",
    ),
    "the restore after sleep level 2": (
        "model.layers.2.input_layernorm.weight",
        """
worker._sleep_saved_parameters = {name: torch.zeros(128)}
worker._restore_sleep_parameters(model)""",
    ),
    "a weight loader": ("model.layers.0.mlp.down_proj.weight", "w.weight_loader(w, torch.zeros_like(w.data))"),
}


class Cast:
    """A disk engine's tokens and state, and an engine on the mapped shard, whose name is `warm`."""

    def __init__(self, child: Any, daemon: Any, model: Path) -> None:
        self.child, self.daemon, self.model = child, daemon, str(model)
        self.tokens = self.start("disk", socket_dir="/nowhere")
        self.state = child("state", name="disk")
        self.start("cold")
        self.start("warm", fallback=False)

    def start(self, name: str, **extra: Any) -> Any:
        return self.child("start", name=name, model=self.model, extra=self.daemon.extra(**extra))["tokens"]

    def changed(self, name: str) -> list[str]:
        """How an engine's weights differ from the disk engine's."""
        return differences(self.state, self.child("state", name=name))

    def unharmed(self) -> None:
        """The shard's digests are those of its commit, and a later engine is the disk engine."""
        assert list(self.daemon.verify().values()) == [True]
        assert self.start("later", fallback=False) == self.tokens and self.changed("later") == []


def test_what_vllm_can_be_asked_to_write_is_refused_with_the_way_out(
    models: Path, daemons: Any, child: Any, copy_of: Any
) -> None:
    """And nothing has happened: after each refusal the engine answers as before."""
    cast, twin = Cast(child, daemons(), models / "llama"), copy_of(models / "llama", "twin")
    zero(twin, "model.norm.weight")
    for what, code in REFUSED.items():
        words = child.failing("evaluate", code=f"twin = {str(twin)!r}\n{PRELUDE}\n{code}")
        assert WAY_OUT in words, f"{what}: {words[:300]}"
        assert child("tokens", name="warm") == cast.tokens and cast.changed("warm") == [], what
    cast.unharmed()


def test_raw_writes_change_that_engine_alone(models: Path, daemons: Any, child: Any) -> None:
    cast = Cast(child, daemons(), models / "llama")
    cast.start("neighbour", fallback=False)
    written: set[str] = set()
    for what, (name, code) in RAW.items():
        child(
            "evaluate", code=f"{PRELUDE}\nname = {name!r}\nw = weights[name]\nwith torch.no_grad():\n    exec({code!r})"
        )
        written.add(name)
        assert {line.partition(":")[0] for line in cast.changed("warm")} == written, what
        assert list(cast.daemon.verify().values()) == [True], what
    assert child("tokens", name="warm") != cast.tokens
    assert child("tokens", name="neighbour") == cast.tokens and cast.changed("neighbour") == []
    cast.unharmed()


def test_what_vllm_ignores_or_refuses_by_itself_leaves_the_shard_alone(models: Path, daemons: Any, child: Any) -> None:
    cast = Cast(child, daemons(), models / "llama")
    for level in (1, 2):
        child(
            "evaluate", code=f'{PRELUDE}\nllm.collective_rpc("sleep", args=({level},))\nllm.collective_rpc("wake_up")'
        )
    words = child.failing("evaluate", code=PRELUDE + 'llm.collective_rpc("update_weights", args=({},))')
    assert "Weight transfer not configured" in words
    child.failing("evaluate", code=PRELUDE + "worker.load_model()")  # vLLM: its layers are there already
    assert child("tokens", name="warm") == cast.tokens and cast.changed("warm") == []
    cast.unharmed()


def test_an_engine_that_copied_its_weights_reloads_and_resets_them(
    models: Path, daemons: Any, child: Any, copy_of: Any
) -> None:
    """The way out that the refusal names. The next engine has the shard as it was: this one holds none any more."""
    daemon, model, twin = daemons(), str(models / "llama"), copy_of(models / "llama", "twin")
    zero(twin, "model.norm.weight")
    plain = child("start", name="twin", model=str(twin), extra=daemon.extra(socket_dir="/nowhere"))["tokens"]
    before = child("start", name="cold", model=model, extra=daemon.extra())["tokens"]
    copied = child("start", name="warm", model=model, extra=daemon.extra(fallback=False, mode="copy"))
    assert copied["tokens"] == before != plain and len(mapped(copied["log"])) == 1
    child("evaluate", code=PRELUDE + 'llm.collective_rpc("reset_weights")')
    assert child("tokens", name="warm") != before
    child("evaluate", code=PRELUDE + 'llm.collective_rpc("reload_weights")')
    assert child("tokens", name="warm") == before
    child("evaluate", code=PRELUDE + f'llm.collective_rpc("reload_weights", kwargs={{"weights_path": {str(twin)!r}}})')
    assert child("tokens", name="warm") == plain
    assert list(daemon.verify().values()) == [True] and child("tokens", name="cold") == before
