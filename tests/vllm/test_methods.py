# SPDX-License-Identifier: Apache-2.0
"""Quantization methods, MoE and MLA: an engine that attaches is, in everything that decides its result, the one that
loaded from disk; a method that cannot be shared is named; and what is poisoned is noticed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import settle
from vllm_lines import mapped, unusable

from wcache.engine.vllm.methods import TABLE
from wcache.engine.vllm.parity import differences

QUANTIZE = Path(__file__).parents[2] / "scripts" / "quantize_model.py"

# Which of its tiny checkpoints a case quantizes.
SHARED = {
    "awq": "llama", "gptq": "qwen3", "packed-int4": "llama", "fp8-channel": "llama", "fp8": "llama",
    "fp8-static": "qwen3",
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a case, made once."""
    root = tmp_path_factory.mktemp("quantized")

    def make(case: str) -> str:
        if case == "mla":
            return str(models / "deepseek")
        made = root / case
        if not made.exists():
            source = models / SHARED.get(case, "llama")
            subprocess.run([sys.executable, "-W", "ignore", QUANTIZE, source, root, case], check=True)
            settle(made)
        return str(made)

    return make


@pytest.mark.parametrize("case", [*SHARED, "mla"])
def test_parity(case: str, checkpoint: Any, daemons: Any, child: Any) -> None:
    """Disk against warm: names, kinds, classes, dtypes, shapes, strides, bytes, every attribute, and greedy tokens."""
    daemon, model = daemons(), checkpoint(case)
    seen = {}
    for how, extra in (("cold", {}), ("warm", {"fallback": False}), ("disk", {"socket_dir": "/nowhere"})):
        began = child("start", name=how, model=model, extra=daemon.extra(**extra))
        seen[how] = (began["tokens"], child("state", name=how), began["log"])
        child("stop", name=how)
        assert not [line for line in began["log"] if "not published" in line]
    assert len(mapped(seen["warm"][2])) == 1 and len(unusable(seen["disk"][2])) == 1
    for how in ("cold", "warm"):
        assert differences(seen["disk"][1], seen[how][1]) == [], how
        assert seen[how][0] == seen["disk"][0], how


def test_a_method_that_hides_its_weights(checkpoint: Any, daemons: Any, child: Any) -> None:
    """Nothing is published, a start that may not fall back names the method, the tokens are those of the disk."""
    daemon, model = daemons(), checkpoint("int8")
    began = child("start", name="first", model=model, extra=daemon.extra())
    [said] = unusable(began["log"])
    assert "(unsupported: CompressedTensorsLinearMethod CompressedTensorsW8A8Int8 CPUInt8ScaledMMLinearKernel" in said
    assert "a oneDNN handle owns the packed weights" in said and daemon.status().shards == ()
    alone = child("start", name="alone", model=model, load_format="auto")
    assert began["tokens"] == alone["tokens"]
    refused = child.failing("start", name="strict", model=model, extra=daemon.extra(fallback=False))
    assert "CPUInt8ScaledMMLinearKernel" in refused.partition("\n")[0]


def test_what_mla_derives_from_its_weights_is_attached_and_not_computed_again(
    checkpoint: Any, daemons: Any, child: Any
) -> None:
    daemon, model = daemons(), checkpoint("mla")
    child("start", name="cold", model=model, extra=daemon.extra())
    code = """
from vllm.model_executor.layers.attention import mla_attention as m
child.kept = m.split_kv_b_proj
def never(*a, **k): raise AssertionError("computed again")
m.split_kv_b_proj = never
"""
    child("evaluate", code=code)
    try:
        child("start", name="warm", model=model, extra=daemon.extra(fallback=False))
    finally:
        child("evaluate", code=code.replace("child.kept = m", "_ = m").replace("= never", "= child.kept"))
    found = child("evaluate", code="""
model = child._model("warm")
held = model._wcache_attachment
inside = lambda t: any(t.data_ptr() == o.data_ptr() for o in held.tensors.values())
result = [inside(m.W_UV) and inside(m.W_UK_T) for m in model.modules() if hasattr(m, "W_UV")]
""")  # fmt: skip
    assert found == [True] * 3


POISONS = {
    "scale": "layer.weight_scale.data.mul_(2)",
    "flag": "layer.quant_method.act_q_static = True",
    "attribute": "layer.input_scale = torch.ones(1)",
    "none": "del layer.input_scale",
    "kernel": "layer.quant_method.fp8_linear = object()",
    "class": "layer.weight.__class__ = type('Other', (torch.nn.Parameter,), {})",
    "stride": "layer.weight.data = layer.weight.data.contiguous()",
    "host scalar": "layer.quant_method.fp8_linear.scale = 2.0",
}


# One after the other, in a layer that got a bit of everything.
READY = """
import functools, numpy, torch
class Slotted: __slots__ = ("value",)
Slotted.__module__ = "vllm.made_up"
layer, other = child._model("engine").model.layers[:2]
functions = [lambda x, by=2: x * by,
             lambda x, by=2: x + by]
layer.act, layer.held, layer.slotted = functions[0], [functools.partial(max, 1)], Slotted()
layer.true, layer.zero, layer.by_kind, layer.array, layer.slotted.value = True, 0.0, {int: 1}, numpy.ones(2), 1
layer.dice = torch.Generator()
layer.register_forward_hook(functions[0])
layer.twin = layer.input_layernorm
"""
OTHERS = {
    "class of a module": "layer.mlp.act_fn.__class__ = type('SiluAndMul', (type(layer.mlp.act_fn),), {})",
    "module under a second name": "layer.twin = None",
    "the same method of another": "layer.input_layernorm._forward_method = other.input_layernorm._forward_method",
    "function of the same name": "layer.act = functions[1]",
    "default": "functions[1].__defaults__ = (3,)",
    "argument of a partial": "layer.held[0] = functools.partial(max, 2)",
    "hook": "layer._forward_hooks[next(iter(layer._forward_hooks))] = functions[1]",
    "one for true": "layer.true = 1",
    "minus zero": "layer.zero = -0.0",
    "key that is no text": "layer.by_kind[int] = 2",
    "array": "layer.array[0] = 2",
    "random numbers": "torch.rand(2, generator=layer.dice)",
    "slot": "layer.slotted.value = 2",
    "note on a tensor": "layer.mlp.down_proj.weight.note = 1",
    "configuration of a library": "child._model('engine').config.rms_norm_eps *= 2",
    "training": "layer.mlp.training = True",
}
NO_DIFFERENCE = {"where the compiler keeps its code": "child._model('engine').model._aot_cache_dir = '/elsewhere'"}
NOTICED = """
from wcache.engine.vllm.parity import differences, portrait
result, model = [], child._model("engine")
for what, code in poisons.items():
    before = portrait(model)
    exec(code)
    result += [] if differences(before, portrait(model)) else [what]
"""


def test_the_parity_harness_notices_whatever_is_poisoned(checkpoint: Any, daemons: Any, child: Any) -> None:
    """Each poison goes into a layer of its own."""
    daemon, model = daemons(), checkpoint("fp8")
    child("start", name="engine", model=model, extra=daemon.extra())
    before = child("state", name="engine")
    layers = [
        f"layers.{n}.{leaf}" for n in range(3) for leaf in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]
    for layer, poison in zip(layers, POISONS.values(), strict=False):
        code = f"import torch\nlayer = child._model('engine').model.get_submodule({layer!r})\n{poison}"
        child("evaluate", code=code)
    found = differences(before, child("state", name="engine"))
    for layer, what in zip(layers, POISONS, strict=False):
        assert any(line.startswith(f"model.{layer}.") for line in found), what
    clean = set(layers[len(POISONS) :])
    assert not [line for line in found if any(layer in line for layer in clean)]
    unnoticed = child("evaluate", code=f"{READY}\npoisons = {OTHERS | NO_DIFFERENCE!r}\n{NOTICED}")
    assert unnoticed == list(NO_DIFFERENCE)


def test_a_state_that_cannot_be_put_back_is_a_miss_and_never_served(checkpoint: Any, daemons: Any, child: Any) -> None:
    """One flag is lost on the way; the engine notices it, names it, and reads the disk."""
    daemon, model, lost = daemons(), checkpoint("awq"), "use_w4a8"
    cold = child("start", name="cold", model=model, extra=daemon.extra())
    child("stop", name="cold")
    code = f"""
from wcache.engine.vllm import census
child.kept = census.restore
census.restore = lambda model, changed: child.kept(
    model, {{k: v for k, v in changed.items() if not k.endswith({lost!r})}})
"""
    child("evaluate", code=code)
    try:
        warm = child("start", name="warm", model=model, extra=daemon.extra())
    finally:
        child("evaluate", code="from wcache.engine.vllm import census\ncensus.restore = child.kept")
    assert not mapped(warm["log"]) and f"{lost}: " in unusable(warm["log"])[0]
    assert warm["tokens"] == cold["tokens"]


def test_every_row_of_the_table_names_a_test_that_exists_and_is_in_the_readme() -> None:
    tests = Path(__file__).parents[1]
    readme = (tests.parent / "README.md").read_text()
    for row in TABLE:
        assert re.search(rf"^\| {re.escape(row.what)} \| {row.way} \|", readme, re.MULTILINE), row.what
        if row.test:
            file, _, function = row.test.partition("::")
            name, _, case = function.rstrip("]").partition("[")
            text = (tests / file).read_text()
            assert not name or f"def {name}(" in text, row.test
            assert not case or f'"{case}"' in text, row.test
        assert row.test or row.why, row.what
