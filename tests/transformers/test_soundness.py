# SPDX-License-Identifier: Apache-2.0
"""What is published is what its name says: damaged, changing and ambiguous checkpoints never reach another engine."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equality
import pytest
import tiny_checkpoints as tiny
import torch
import transformers
from daemons import Daemon
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import wcache
from wcache.engine import publish
from wcache.errors import CheckpointError, Miss

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Load = Callable[..., Any]


def is_shared(model: Any) -> bool:
    return wcache.transformers.attachment(model) is not None


def damage(file: Path) -> None:
    """Other bytes in the middle of the weights, in place."""
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    middle = (begin + len(data)) // 2
    with file.open("r+b") as f:
        f.seek(middle)
        f.write(bytes(b ^ 255 for b in data[middle : middle + 64]))


@pytest.fixture
def hub(short_dir: Path) -> tuple[Path, Path]:
    """A good checkpoint, and a snapshot of it in a hub's cache whose blob is damaged under its old name."""
    good = tiny.save("llama-tied", short_dir / "good")
    blobs, snapshot = short_dir / "hub/models--org--m/blobs", short_dir / "hub/models--org--m/snapshots" / ("a" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = blobs / hashlib.sha256((good / "model.safetensors").read_bytes()).hexdigest()
    shutil.copy(good / "config.json", snapshot)
    shutil.copy(good / "model.safetensors", blob)
    damage(blob)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    tiny.settle(blobs)
    return good, snapshot


def test_a_damaged_blob_is_not_published_under_the_name_it_has(hub: tuple[Path, Path], load: Load, caplog: Any) -> None:
    good, snapshot = hub
    assert not is_shared(load(snapshot))
    assert "the bytes of a file are not what its name in the hub's cache says" in caplog.text
    load(good)
    equality.same(load(good, fallback=False), AutoModelForCausalLM.from_pretrained(good))


def test_tensors_handed_over_for_a_damaged_blob_are_another_checkpoint(hub: tuple[Path, Path], daemon: Daemon) -> None:
    good, snapshot = hub
    wcache.publish(load_file(snapshot / "model.safetensors"), snapshot, socket_path=daemon.path)
    with pytest.raises(Miss):
        wcache.attach(good, socket_path=daemon.path, fallback=False)


def two_files(directory: Path, first: Mapping[str, Any], second: Mapping[str, Any], base: Path) -> Path:
    directory.mkdir()
    shutil.copy(base / "config.json", directory)
    for file, tensors in {FIRST: first, SECOND: second}.items():
        save_file(dict(tensors), directory / file, metadata={"format": "pt"})
    weight_map = {**dict.fromkeys(first, FIRST), **dict.fromkeys(second, SECOND)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tiny.settle(directory)
    return directory


def test_a_tensor_in_two_files_is_never_shared(short_dir: Path, load: Load, caplog: Any) -> None:
    """Transformers takes the last one that it reads, whatever the index says."""
    base = tiny.save("llama-tied", short_dir / "base")
    tensors = load_file(base / "model.safetensors")
    norm = "model.norm.weight"
    stale = {name: tensors[name] for name in sorted(tensors)[:4]} | {norm: tensors[norm] * 3}
    current = {name: tensors[name] for name in tensors if name not in stale} | {norm: tensors[norm]}
    for name, files in {"a": (stale, current), "b": (current, stale)}.items():
        directory = two_files(short_dir / name, *files, base)
        model = load(directory)
        assert not is_shared(model)
        assert f"'{norm}' in {FIRST} and {SECOND}" in caplog.text
        equality.same(model, AutoModelForCausalLM.from_pretrained(directory))


@pytest.fixture
def written_meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let a file be written to while its tensors are being copied."""

    def arrange(file: Path) -> None:
        blocks = publish.blocks

        def late(entries: Any) -> Any:
            damage(file)
            return blocks(entries)

        monkeypatch.setattr(publish, "blocks", late)

    return arrange


def test_a_file_that_changes_while_its_tensors_are_copied_is_not_published(
    short_dir: Path, load: Load, written_meanwhile: Any, daemon: Daemon, caplog: Any
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    written_meanwhile(directory / "model.safetensors")
    assert not is_shared(load(directory))
    assert f"{directory} changed while it was being loaded" in caplog.text
    assert daemon.status().shards == ()


def test_tensors_of_a_file_that_changes_while_they_are_copied_are_refused(
    short_dir: Path, written_meanwhile: Any, daemon: Daemon
) -> None:
    directory = tiny.save("llama-untied", short_dir / "model")
    tensors = load_file(directory / "model.safetensors")
    written_meanwhile(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"changed while loading: model\.safetensors"):
        wcache.publish(tensors, directory, socket_path=daemon.path)
    assert daemon.status().shards == ()


def test_a_link_that_is_switched_and_back_while_files_are_opened_changes_nothing(
    short_dir: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, current = short_dir / "old", short_dir / "new", short_dir / "current"
    for seed, directory in enumerate((old, new)):
        tiny.save("llama-untied", directory, seed=seed)

    def point(to: Path) -> None:
        (short_dir / "next").symlink_to(to)
        (short_dir / "next").replace(current)

    opened = transformers.modeling_utils.safe_open

    def switching(*args: Any, **more: Any) -> Any:
        point(new)
        try:
            return opened(*args, **more)
        finally:
            point(old)

    point(old)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.modeling_utils, "safe_open", switching)
        load(current)
    equality.same(load(old, fallback=False), AutoModelForCausalLM.from_pretrained(old))


def test_what_a_constructor_makes_with_values_decides(
    short_dir: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read from elsewhere, computed, or drawn: the next start may have another one."""
    directory = tiny.save("llama-tied", short_dir / "model")
    made = torch.tensor([1.0, 2.0])
    init = transformers.LlamaForCausalLM.__init__

    def with_more(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self.codec = torch.tensor(made.tolist(), device="cpu")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", with_more)
    load(directory)
    assert load(directory, fallback=False).codec.tolist() == [1, 2]
    made[0] = 3
    assert load(directory).codec.tolist() == [3, 2]


def test_a_second_model_of_one_call_is_named(short_dir: Path, load: Load, monkeypatch: Any, caplog: Any) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")
    chosen = transformers.LlamaForCausalLM

    class Both(nn.Module):
        @classmethod
        def from_pretrained(cls, path: Path, **more: Any) -> Any:
            both = cls()
            both.one, both.other = chosen.from_pretrained(path, **more), chosen.from_pretrained(path, **more)
            return both.one

    load(directory, auto_class=Both)
    assert "LlamaForCausalLM is a second model that this call loads" in caplog.text
    with pytest.raises(Miss, match="second model"):
        load(directory, auto_class=Both, fallback=False)


@pytest.mark.parametrize("how", ["transformers", "cached"])
def test_who_is_interrupted_while_publishing_lets_others_publish(
    short_dir: Path, load: Load, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    directory = tiny.save("llama-tied", short_dir / "model")

    def start() -> Any:
        if how == "transformers":
            return load(directory, state_timeout_s=60)
        return wcache.cached(lambda: nn.Linear(2, 2), key="k", socket_path=daemon.path, state_timeout_s=60)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wcache.engine.snapshot, "take", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            start()
    start()
    assert len(daemon.status().shards) == 1
    assert kept.value is not None
