# SPDX-License-Identifier: Apache-2.0
"""`wcache.transformers.from_pretrained` gives the model that Transformers gives, bit for bit, cold and warm."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equality
import pytest
import safetensors.torch
import tiny_checkpoints as tiny
import torch
import transformers
from daemons import Daemon
from torch import nn

import wcache
from wcache.engine.transformers import layout
from wcache.engine.transformers.drawn import Drawn
from wcache.errors import ConfigError, Miss, TrainingRefused
from wcache.model import MissReason

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def source(model: Any) -> str:
    held = wcache.transformers.attachment(model)
    return held.source if held is not None else "private"


def twice(load: Callable[..., Any], directory: Path, **options: Any) -> tuple[Any, Any]:
    cold, warm = load(directory, **options), load(directory, **options, fallback=False)
    assert (source(cold), source(warm)) == ("disk", "cache")
    return cold, warm


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_tensor_is_what_transformers_loads(
    short_dir: Path, load: Callable[..., Any], opened: Callable[..., Any], name: str
) -> None:
    directory = tiny.save(name, short_dir / "model", max_shard_size="20KB")
    auto = tiny.MODELS[name][2]
    plain = getattr(transformers, auto).from_pretrained(directory)
    cold = load(directory, auto_class=auto)
    with opened(directory) as names:
        warm = load(directory, auto_class=getattr(transformers, auto), fallback=False)
    assert not [n for n in names if n.endswith(".safetensors")]
    for model in (cold, warm):
        equality.same(model, plain)
        assert model.config.to_dict() == plain.config.to_dict()
        assert not model.training
    assert cold.all_tied_weights_keys == warm.all_tied_weights_keys == plain.all_tied_weights_keys
    if plain.can_generate():
        assert warm.generation_config.to_dict() == plain.generation_config.to_dict()
        tokens = [m.generate(tiny.input_ids(), **GREEDY).tolist() for m in (plain, cold, warm)]
        assert tokens[0] == tokens[1] == tokens[2]


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ODD: dict[str, tuple[str, dict[str, Any], str, torch.dtype]] = {
    "infinity in the configuration": (
        "Mamba2Config",
        {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
         "n_groups": 1},
        "Mamba2ForCausalLM", torch.float32,
    ),
    "parametrized modules": (
        "Wav2Vec2Config",
        {**VISION, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        "Wav2Vec2ForCTC", torch.float32,
    ),
    "models in models": (
        "LlavaConfig",
        {"text_config": {"model_type": "llama", **tiny.SIZES}, "image_token_id": 5,
         "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 16, "patch_size": 8}},
        "LlavaForConditionalGeneration", torch.bfloat16,
    ),
    "latent attention, shared experts": (
        "DeepseekV3Config",
        {**tiny.SIZES, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        "DeepseekV3ForCausalLM", torch.bfloat16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_kinds_of_models_come_back(
    short_dir: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(tiny.MODELS, name, ODD[name])
    directory = tiny.save(name, short_dir / "model")
    chosen = getattr(transformers, ODD[name][2])
    plain = chosen.from_pretrained(directory)
    for model in twice(load, directory, auto_class=chosen):
        equality.same(model, plain)
        assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"dtype": "float32"},
        {"attn_implementation": "eager"},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"auto_class": "AutoModel"},
        {"num_hidden_layers": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"output_loading_info": True},
    ],
    ids=str,
)
def test_arguments_mean_what_they_mean_to_transformers(
    short_dir: Path, load: Callable[..., Any], options: dict[str, Any]
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    rest = {k: v for k, v in options.items() if k != "auto_class"}
    auto = getattr(transformers, options.get("auto_class", "AutoModelForCausalLM"))
    plain = auto.from_pretrained(directory, **rest)
    cold, warm = load(directory, **options), load(directory, **options, fallback=False)
    if "output_loading_info" in options:
        assert cold[1] == warm[1] == plain[1]
        plain, cold, warm = plain[0], cold[0], warm[0]
    for model in (cold, warm):
        equality.same(model, plain)
        assert model.config._attn_implementation == plain.config._attn_implementation


def test_the_attention_implementation_decides_no_tensor(short_dir: Path, load: Callable[..., Any]) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    load(directory, attn_implementation="eager")
    assert source(load(directory, attn_implementation="sdpa", fallback=False)) == "cache"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "float32"}, "layout.dtype"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "layout.rope.rope_theta"),
        ({"auto_class": "AutoModel"}, "layout.architecture"),
        ({"num_hidden_layers": 1}, "layout.extra.config.num_hidden_layers"),
    ],
    ids=str,
)
def test_what_would_be_another_model_is_a_miss_that_names_the_field(
    short_dir: Path, load: Callable[..., Any], options: dict[str, Any], field: str
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    load(directory)
    with pytest.raises(Miss) as miss:
        load(directory, **options, fallback=False)
    assert miss.value.reason is MissReason.LAYOUT
    assert field in [d.field for d in miss.value.differences]


def test_a_fine_tune_of_the_same_shapes_is_never_served_the_original(
    daemon: Daemon, short_dir: Path, load: Callable[..., Any]
) -> None:
    load(tiny.save("llama-tied", short_dir / "a", seed=1))
    other = tiny.save("llama-tied", short_dir / "b", seed=2)
    equality.same(load(other), transformers.AutoModelForCausalLM.from_pretrained(other))
    assert len(daemon.status().shards) == 2


def test_a_heads_that_is_tied_by_configuration_and_not_by_value_stays_apart(
    short_dir: Path, load: Callable[..., Any]
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for model in twice(load, directory):
        equality.same(model, plain)
        assert model.all_tied_weights_keys == plain.all_tied_weights_keys
        assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_generation_settings_come_from_the_directory_each_time(short_dir: Path, load: Callable[..., Any]) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    load(directory)
    transformers.GenerationConfig(max_new_tokens=3, do_sample=False).save_pretrained(directory)
    warm = load(directory, fallback=False)
    assert warm.generation_config.max_new_tokens == 3
    assert source(warm) == "cache"


def test_weights_that_transformers_makes_up_are_not_published(
    daemon: Daemon, short_dir: Path, load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny.save("bert", short_dir / "model")
    model = load(directory, auto_class="AutoModelForSequenceClassification")
    assert source(model) == "private"
    assert "classifier.bias and 1 more are not in the checkpoint" in caplog.text
    assert not daemon.status().shards


class Quiet(transformers.BertForSequenceClassification):
    """Tells Transformers to say nothing of a head that is not in the checkpoint."""

    _keys_to_ignore_on_load_missing = ["classifier"]


class Zeroed(Quiet):
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # random numbers, first
        if module is self.classifier:
            transformers.initialization.zeros_(module.weight)


def test_a_head_that_is_made_up_in_silence_is_shared_only_if_it_is_the_same_every_time(
    daemon: Daemon, short_dir: Path, load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny.save("bert", short_dir / "model")
    assert source(load(directory, auto_class=Quiet)) == "private"
    assert "classifier.weight is not in the checkpoint: Transformers made" in caplog.text
    assert not daemon.status().shards
    plain = Zeroed.from_pretrained(directory)
    for model in twice(load, directory, auto_class=Zeroed):
        equality.same(model, plain)


def test_random_numbers_and_memory_that_nobody_wrote_are_told_from_what_overwrites_them() -> None:
    model, kept = nn.Module(), torch.empty(4)
    for name in ("drawn", "computed", "unwritten", "cast", "overwritten", "pieces", "unused", "kept"):
        model.register_buffer(name, torch.zeros(4))
    model.kept = kept
    with Drawn() as drawn:
        torch.nn.init.trunc_normal_(model.drawn)
        model.computed.copy_(torch.rand(2).repeat(2) + 1)
        model.unwritten = torch.empty_like(model.drawn)
        model.cast = torch.empty(4).half()
        model.overwritten.normal_().copy_(torch.arange(4))
        pieces = torch.empty(4)
        pieces[:2], pieces[2:] = 0, torch.arange(2).float().sin()
        model.pieces.copy_(pieces)
        torch.randn(4)
        model.unused.fill_(1)
    assert drawn.names(model) == ["drawn", "computed", "unwritten", "cast"]


def test_files_of_another_format_beside_those_that_transformers_reads_do_not_matter(
    short_dir: Path, load: Callable[..., Any]
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    load(directory)
    other = directory / "consolidated.safetensors"
    safetensors.torch.save_file({"output.weight": torch.zeros(3)}, other, {"format": "pt"})
    assert source(load(directory, fallback=False)) == "cache"


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_published(
    daemon: Daemon, short_dir: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    file = directory / "model.safetensors"
    convert = transformers.modeling_utils.convert_and_load_state_dict_in_model

    def meddled(*args: Any, **kwargs: Any) -> Any:
        done = convert(*args, **kwargs)
        safetensors.torch.save_file(safetensors.torch.load_file(file), file, {"format": "pt"})
        return done

    monkeypatch.setattr(transformers.modeling_utils, "convert_and_load_state_dict_in_model", meddled)
    assert source(load(directory)) == "private"
    assert not daemon.status().shards


def test_a_model_with_code_of_its_own_comes_back_with_its_bare_tensors(
    short_dir: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = own_code(short_dir / "own", factor=2)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(short_dir / "modules"))
    options = {"auto_class": "AutoModel", "trust_remote_code": True}
    plain = transformers.AutoModel.from_pretrained(directory, trust_remote_code=True)
    cold, warm = twice(load, directory, **options)
    for model in (cold, warm):
        equality.same(model, plain)
        assert torch.equal(model(torch.ones(1, 8)), plain(torch.ones(1, 8)))
    source_file = directory / "own.py"
    source_file.write_text(source_file.read_text() + "\n# a comment may be anything\n")
    with pytest.raises(Miss) as miss:
        load(directory, **options, fallback=False)
    assert miss.value.reason in (MissReason.CONTENT, MissReason.LAYOUT)


@pytest.mark.parametrize("way", ["positional", "keyword", "past a configuration"])
def test_what_is_given_to_a_models_own_constructor_decides(
    short_dir: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    directory = own_code(short_dir / "own", factor=2)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(short_dir / "modules"))
    trust = {"trust_remote_code": True}
    for factor in (3, 4):
        config = transformers.AutoConfig.from_pretrained(directory, **trust)
        config.factor = 3
        past = {"config": config} if way == "past a configuration" else {}
        positional, given = ((factor,), {}) if way == "positional" else ((), {"factor": factor})
        plain = transformers.AutoModel.from_pretrained(directory, *positional, **past, **given, **trust)
        for fallback in (True, False):
            options = {**past, **given, **trust, "auto_class": "AutoModel", "fallback": fallback}
            equality.same(load(directory, *positional, **options), plain)


def test_a_buffer_with_random_numbers_is_not_shared(
    daemon: Daemon, short_dir: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = own_code(short_dir / "own", factor=2)
    source_file = directory / "own.py"
    source_file.write_text(source_file.read_text().replace("module.table.copy_(", "module.table.normal_() # ("))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(short_dir / "modules"))
    made = [load(directory, auto_class="AutoModel", trust_remote_code=True) for _ in range(2)]
    assert not torch.equal(made[0].table, made[1].table)
    assert not daemon.status().shards


def test_the_source_of_every_module_is_part_of_the_layout(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(short_dir)
    found = []
    for scale in (1, 2):
        (short_dir / f"rotary{scale}.py").write_text(
            f"import torch\nclass Rotary(torch.nn.Module):\n  scale = {scale}\n"
        )
        model = transformers.BertModel(transformers.BertConfig(**tiny.MODELS["bert"][1]))
        assert layout._code(model) is None
        model.rotary = importlib.import_module(f"rotary{scale}").Rotary()
        found.append(layout._code(model))
    assert None not in found
    assert found[0] != found[1]


def own_code(directory: Path, factor: int) -> Path:
    directory.mkdir()
    (directory / "own.py").write_text(tiny.OWN_CODE.replace("FACTOR", str(factor)))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config = {
        "model_type": "wcache-own",
        "width": 8,
        "auto_map": auto,
        "architectures": ["OwnModel"],
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"layer.weight": torch.rand(8, 8), "layer.bias": torch.rand(8), "running": torch.rand(8)}
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_training_is_refused_aloud_and_possible_in_copy_mode(
    daemon: Daemon, short_dir: Path, load: Callable[..., Any]
) -> None:
    directory, ids = tiny.save("llama-untied", short_dir / "model"), tiny.input_ids()
    for model in twice(load, directory):
        with pytest.raises(TrainingRefused):
            model(ids, labels=ids).loss.backward()
    copy = load(directory, mode="copy", fallback=False)
    copy(ids, labels=ids).loss.backward()
    before = copy.model.norm.weight.detach().clone()
    torch.optim.SGD(copy.parameters(), lr=0.1).step()
    assert not torch.equal(copy.model.norm.weight, before)


def test_writes_to_shared_parameters_are_seen_by_nobody_else(short_dir: Path, load: Callable[..., Any]) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for model in twice(load, directory):
        with torch.no_grad():
            model.model.norm.weight.zero_()
    equality.same(load(directory, fallback=False), plain)


def test_copy_mode_frees_the_cache(daemon: Daemon, short_dir: Path, load: Callable[..., Any]) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    load(directory)
    copy = load(directory, mode="copy", fallback=False)
    equality.same(copy, transformers.AutoModelForCausalLM.from_pretrained(directory))
    assert not daemon.status().shards


def test_without_a_daemon_transformers_loads_and_nothing_is_hashed(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    options: dict[str, Any] = {"socket_path": short_dir / "none.sock", "connect_timeout_s": 0.1}
    model = wcache.transformers.from_pretrained(directory, **options)
    equality.same(model, transformers.AutoModelForCausalLM.from_pretrained(directory))
    assert "Weight cache unusable (no_daemon:" in caplog.text
    assert "hashing" not in caplog.text
    with pytest.raises(Miss):
        wcache.transformers.from_pretrained(directory, **options, fallback=False)


def test_what_transformers_refuses_is_its_own_error_and_the_rank_is_free_again(
    short_dir: Path, load: Callable[..., Any]
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    with pytest.raises(TypeError, match="no_such_argument"):
        load(directory, no_such_argument=1)
    with pytest.raises(OSError, match="no-such-directory"):
        load(short_dir / "no-such-directory")
    with pytest.raises(ConfigError, match="auto_class"):
        load(directory, auto_class="AutoModelForNothing")
    assert source(load(directory)) == "disk"


def test_transformers_itself_is_left_as_it_was(short_dir: Path, load: Callable[..., Any]) -> None:
    base = transformers.PreTrainedModel
    before = {n: vars(base)[n] for n in ("_load_pretrained_model", "_finalize_model_loading")}
    directory = tiny.save("llama-tied", short_dir / "model")
    twice(load, directory)
    assert {n: vars(base)[n] for n in before} == before
    assert source(transformers.AutoModelForCausalLM.from_pretrained(directory)) == "private"


def test_a_warm_model_is_saved_in_the_checkpoints_own_format(short_dir: Path, load: Callable[..., Any]) -> None:
    """Transformers merges experts while it loads, and takes them apart again when it saves."""
    directory = tiny.save("mixtral", short_dir / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for name, model in zip(("plain", "cold", "warm"), (plain, *twice(load, directory)), strict=True):
        model.save_pretrained(short_dir / name)
    saved = [(short_dir / name / "model.safetensors").read_bytes() for name in ("plain", "cold", "warm")]
    assert saved[0] == saved[1] == saved[2]
