# SPDX-License-Identifier: Apache-2.0
"""Quantization by torchao and bitsandbytes, whose weights are more than one tensor each: all of it comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equality
import pytest
import tiny_checkpoints as tiny
import torch
import torchao.quantization as ao
import transformers
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Params4bit
from daemons import Daemon
from torch import nn

import wcache
from wcache.engine import parts
from wcache.errors import PublishError, StructureError

# Transformers warns of every quantization_config beside the checkpoint's; bitsandbytes of casts that it makes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]

TORCHAO = {
    "int8": lambda: ao.Int8WeightOnlyConfig(),
    "int8-dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
    "fp8": lambda: ao.Float8WeightOnlyConfig(),
    "intx": lambda: ao.IntxWeightOnlyConfig(),
}
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "8-bit": {"load_in_8bit": True},
    "fp4": {"load_in_4bit": True},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@pytest.fixture
def directory(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose layers are wide enough for a block of 64."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    kind, arguments, model, dtype = tiny.MODELS["llama-tied"]
    monkeypatch.setitem(tiny.MODELS, "llama-tied", (kind, {**arguments, **wide}, model, dtype))
    return tiny.save("llama-tied", short_dir / "model")


def contents(model: nn.Module) -> dict[str, Any]:
    """Every tensor of a model, inner ones too, and everything else that its parameters keep, as text."""
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if hasattr(tensor, "__tensor_flatten__"):
            inner, context = tensor.__tensor_flatten__()
            found |= {f"{name}:{part}": getattr(tensor, part) for part in inner}
            found[name] = (type(tensor), tuple(tensor.shape), str(context))
        else:
            found[name] = tensor
    for name, parameter in model.named_parameters():
        found[f"{name} attributes"] = sorted((k, type(v)) for k, v in vars(parameter).items())
        found |= {f"{name} {k}": v for k, v in vars(parameter).items() if isinstance(v, torch.Tensor)}
        if isinstance(parameter, Params4bit):
            found |= dict(_state(f"{name} state", parameter.quant_state))
            assert model.get_submodule(name.rpartition(".")[0]).quant_state is parameter.quant_state
            assert parameter.module is model.get_submodule(name.rpartition(".")[0])
    return found


def _state(name: str, state: QuantState) -> Iterator[tuple[str, Any]]:
    for key, value in vars(state).items():
        if isinstance(value, QuantState):
            yield from _state(f"{name}.{key}", value)
        else:
            yield f"{name}.{key}", value


def same(a: nn.Module, b: nn.Module) -> None:
    mine, theirs = contents(a), contents(b)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            equality.same_tensor(value, theirs[name], name)
        else:
            assert value == theirs[name], name
    assert equality.plain(a) == equality.plain(b)


def check(load: Callable[..., Any], directory: Path, options: Callable[[], dict[str, Any]]) -> Any:
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, **options())
    cold, warm = load(directory, **options()), load(directory, **options(), fallback=False)
    assert wcache.transformers.attachment(warm).source == "cache"
    for model in (cold, warm):
        same(model, plain)
        assert model.config.to_dict() == plain.config.to_dict()
    tokens = [m.generate(tiny.input_ids(), max_new_tokens=4, do_sample=False).tolist() for m in (plain, cold, warm)]
    assert tokens[0] == tokens[1] == tokens[2]
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options())


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_comes_back_whether_quantized_now_or_before(
    short_dir: Path, directory: Path, load: Callable[..., Any], name: str
) -> None:
    """Not asserted: that no file is opened. Transformers itself reads each file's header for torchao's metadata."""
    made = check(load, directory, lambda: {"quantization_config": transformers.TorchAoConfig(TORCHAO[name]())})
    made.save_pretrained(short_dir / "quantized")
    tiny.settle(short_dir / "quantized")
    check(load, short_dir / "quantized", dict)


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes_comes_back_whether_quantized_now_or_before(
    short_dir: Path, directory: Path, load: Callable[..., Any], opened: Callable[..., Any], name: str
) -> None:
    made = check(
        load, directory, lambda: {"quantization_config": transformers.BitsAndBytesConfig(**BITSANDBYTES[name])}
    )
    quantized = short_dir / "quantized"
    made.save_pretrained(quantized)
    tiny.settle(quantized)
    check(load, quantized, dict)
    with opened(quantized) as names:
        load(quantized, fallback=False)
    assert not [n for n in names if n.endswith(".safetensors")]


def test_the_packed_weights_are_shared_and_not_copied(directory: Path, load: Callable[..., Any]) -> None:
    def options() -> dict[str, Any]:
        return {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True)}

    load(directory, **options())
    warm = load(directory, **options(), fallback=False)
    weight = warm.model.layers[0].mlp.up_proj.weight
    for tensor in (weight, weight.quant_state.absmax):
        assert "memfd" in mapped_file(tensor.data_ptr())


def mapped_file(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(x, 16) for x in line.split()[0].split("-"))
        if first <= address < last:
            return line.partition("/")[2]
    return ""


def test_a_configuration_that_loading_changes_is_not_shared(
    daemon: Daemon, directory: Path, load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """torchao can untie a head while it loads, which the configuration of the next start would not say."""
    config = transformers.TorchAoConfig(
        ao.Int8WeightOnlyConfig(), include_input_output_embeddings=True, untie_embedding_weights=True
    )
    with caplog.at_level(logging.WARNING):
        load(directory, quantization_config=config)
    assert "loading changed the model's configuration" in caplog.text
    assert not daemon.status().shards


def quantize(module: nn.Module) -> None:
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    ao.quantize_(module, ao.Int8WeightOnlyConfig())


def must_not_run(module: nn.Module) -> None:
    raise AssertionError("a hit loads nothing")


def test_a_plain_module_that_torchao_quantized_comes_back(daemon: Daemon) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))

    plain = build()
    quantize(plain)
    for action in (quantize, must_not_run):
        made = wcache.cached(build, key="k", load=action, socket_path=daemon.path)
        same(made, plain)
        assert torch.equal(made(torch.ones(2, 64)), plain(torch.ones(2, 64)))


def test_what_a_quantizer_hides_where_nobody_looks_is_refused() -> None:
    linear = nn.Linear(64, 64)
    ao.quantize_(linear, ao.Int8WeightOnlyConfig())
    linear.weight.act_quant_kwargs = object()
    with pytest.raises(PublishError, match=r"weight keeps a builtins\.object, which has no plain form"):
        parts.apart("weight", linear.weight, linear)


@pytest.mark.parametrize("reference", ["os:system", "torchao:no_such_thing", "torchao.quantization:quantize_"])
def test_a_shard_cannot_name_just_any_type(reference: str) -> None:
    with pytest.raises(StructureError, match=reference):
        parts.together({"type": reference, "state": {}, "also": {}}, {}, None, nn.Linear(1, 1), grad=False)
