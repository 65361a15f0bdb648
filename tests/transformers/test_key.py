# SPDX-License-Identifier: Apache-2.0
"""What decides a Transformers model's tensors besides its checkpoint and configuration is part of the layout key."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equality
import pytest
import tiny_checkpoints as tiny
import transformers
from daemons import Daemon
from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter, WeightRenaming

import wcache
from wcache.engine.transformers import layout

MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from own_configuration import OwnConfig
from own_settings import OFFSET
import own_tables

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            module.table.copy_(own_tables.table(8) * self.config.scale + OFFSET)
"""
CONFIGURATION = """
from transformers import PreTrainedConfig

class OwnConfig(PreTrainedConfig):
    model_type = "wcache-own"

    @property
    def scale(self):
        return 1.0
"""
FILES = {
    "own_modeling.py": MODELING,
    "own_configuration.py": CONFIGURATION,
    "own_settings.py": "OFFSET = 1.0\n",
    "own_tables.py": "from own_numbers import numbers\ndef table(n): return numbers(n)\n",
    "own_numbers.py": "import torch\ndef numbers(n): return torch.arange(n) * 1.0\n",
    "own_stranger.py": "UNUSED = 1.0\n",
}
# Prints where the weights came from and whether they are those that Transformers loads.
START = """
import sys
import torch, wcache, own_modeling
directory, socket = sys.argv[1:]
model = wcache.transformers.from_pretrained(directory, auto_class=own_modeling.OwnModel, socket_path=socket)
plain = own_modeling.OwnModel.from_pretrained(directory)
print(wcache.transformers.attachment(model).source, torch.equal(model.table, plain.table))
"""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], None]:
    """Conversions of Llama checkpoints, until the test ends."""

    def register(conversions: list[Any]) -> None:
        conversion_mapping.register_checkpoint_conversion_mapping("llama", conversions, overwrite=True)

    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    cache = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", dict(cache))
    return register


def source(model: Any) -> str:
    held = wcache.transformers.attachment(model)
    return held.source if held is not None else "private"


def cold_then_warm(load: Callable[..., Any], directory: Path, **options: Any) -> None:
    """A first start of its kind misses, the second hits, and both are what Transformers loads."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    for expected in ("disk", "cache"):
        model = load(directory, **options)
        assert source(model) == expected
        equality.same(model, plain)


def swapped(first: str, second: str) -> list[Any]:
    """Renames that exchange two projections of the first layer."""
    names = [(first, "kept"), (second, first), ("kept", second)]
    return [WeightRenaming(rf"layers\.0\.self_attn\.{a}", f"layers.0.self_attn.{b}") for a, b in names]


def test_conversions_that_were_registered_decide(
    short_dir: Path, load: Callable[..., Any], registered: Callable[[list[Any]], None]
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    cold_then_warm(load, directory)
    registered(swapped("k_proj", "v_proj"))
    cold_then_warm(load, directory)


def test_the_parameters_of_a_conversions_operations_decide(
    short_dir: Path, load: Callable[..., Any], registered: Callable[[list[Any]], None]
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    for dims in ((0, 1), (0, 0)):  # the projection is square
        square = WeightConverter(["self_attn.q_proj.weight"], ["self_attn.q_proj.weight"], [Transpose(*dims)])
        registered([square])
        cold_then_warm(load, directory)


class Scale(ConversionOps):
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def convert(self, input_dict: dict[str, Any], *_: Any, **more: Any) -> dict[str, Any]:
        return {k: self.factor() * (v[0] if isinstance(v, list) else v) for k, v in input_dict.items()}


def test_an_operation_that_cannot_be_described_is_not_shared(
    daemon: Daemon, short_dir: Path, load: Callable[..., Any], registered: Callable[[list[Any]], None]
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    name = "self_attn.q_proj.weight"
    registered([WeightConverter([name], [name], [Scale(lambda: 2)])])
    equality.same(load(directory), transformers.AutoModelForCausalLM.from_pretrained(directory))
    assert not daemon.status().shards


def test_the_order_of_a_key_mapping_decides(short_dir: Path, load: Callable[..., Any]) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    pairs = [(r"layers\.0\.", "layers.9."), (r"layers\.1\.", "layers.0."), (r"layers\.9\.", "layers.1.")]
    for mapping in (dict(pairs), dict(reversed(pairs))):
        cold_then_warm(load, directory, key_mapping=mapping)


def test_modules_that_are_kept_in_float32_decide(
    short_dir: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    cold_then_warm(load, directory)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["lm_head", "norm"])
    cold_then_warm(load, directory)


def test_a_configuration_of_the_programs_own_decides(daemon: Daemon, short_dir: Path) -> None:
    code, directory = written(short_dir / "code"), short_dir / "model"

    def start(before: str = "") -> str:
        return run(code, before + START, str(directory), str(daemon.path))

    assert (
        start(f"import own_modeling as m; m.OwnModel(m.OwnConfig()).save_pretrained({str(directory)!r})") == "disk True"
    )
    (code / "own_stranger.py").write_text("UNUSED = 2.0\n")
    assert start() == "cache True"
    (code / "own_configuration.py").write_text(CONFIGURATION.replace("1.0", "0.5"))
    assert start() == "disk True"


def test_every_file_of_the_programs_own_code_that_a_model_refers_to_decides(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = written(short_dir / "code")
    monkeypatch.syspath_prepend(code)
    own = importlib.import_module("own_modeling")
    importlib.import_module("own_stranger")
    model = own.OwnModel(own.OwnConfig())
    found = [layout._code(model)]
    for name, text in FILES.items():
        (code / name).write_text(text + "# edited\n")
        found.append(layout._code(model))
    for name in FILES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"))
    *deciding, stranger = found
    assert len(set(deciding)) == len(FILES)
    assert stranger == deciding[-1]


def written(code: Path) -> Path:
    code.mkdir()
    for name, text in FILES.items():
        (code / name).write_text(text)
    return code


def run(code: Path, program: str, *arguments: str) -> str:
    """The last line that a process of its own prints."""
    path = os.pathsep.join([str(code), *filter(None, sys.path)])
    command = [sys.executable, "-B", "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (done.stdout.splitlines() or [""])[-1]


def test_thousands_of_labels_fit_into_a_question_and_decide(short_dir: Path, load: Callable[..., Any]) -> None:
    """As many as ImageNet-21k has."""
    directory = short_dir / "model"
    config = transformers.ViTConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8,
        id2label=labels("label"), label2id={v: k for k, v in labels("label").items()},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(directory)
    tiny.settle(directory)
    options: dict[str, Any] = {"auto_class": "AutoModelForImageClassification"}
    assert [source(load(directory, **options)) for _ in range(2)] == ["disk", "cache"]
    assert load(directory, **options).config.id2label[7] == "label 00000007"
    assert source(load(directory, **options, id2label=labels("other"))) == "disk"


def labels(kind: str) -> dict[int, str]:
    return {i: f"{kind} {i:08d}" for i in range(21841)}
