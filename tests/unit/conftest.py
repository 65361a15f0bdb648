# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a few hundred bytes, good and bad, written byte by byte: no library that would refuse to.

And a CUDA backend over a driver that is ordinary memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeDriver, uuid

from wcache.weights.segment_cuda import CudaBackend

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I64": 8}
EMBED = ("model.embed_tokens.weight", "BF16", [16, 8], 1)
QUERY = ("model.layers.0.self_attn.q_proj.weight", "BF16", [8, 8], 2)
HEAD = ("lm_head.weight", "BF16", [16, 8], 3)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Tensor = tuple[str, str, Sequence[int], int]


def noise(size: int, seed: int) -> bytes:
    """`size` deterministic bytes."""
    return hashlib.shake_128(b"%d" % seed).digest(size)


def entry(dtype: str, shape: Sequence[object], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def framed(header: bytes, body: bytes = b"") -> bytes:
    """A safetensors file of these parts, whatever they are."""
    return struct.pack("<Q", len(header)) + header + body


def safetensors(tensors: Sequence[Tensor], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, dtype, shape, seed in tensors:
        size = SIZES[dtype]
        for dim in shape:
            size *= dim
        header[name] = entry(dtype, shape, len(body), len(body) + size)
        body += noise(size, seed)
    text = json.dumps(header).encode()
    return framed(text + b" " * (-len(text) % 8), body)


@dataclass
class Model:
    """A checkpoint directory in the making."""

    directory: Path
    embed: Tensor = EMBED
    query: Tensor = QUERY
    head: Tensor = HEAD
    index_name: str = field(default="model.safetensors.index.json")

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.directory / name

    def config(self, **more: object) -> Model:
        config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 16, **more}
        self.path("config.json").write_text(json.dumps(config))
        return self

    def file(self, name: str, *tensors: Tensor) -> Model:
        return self.raw(name, safetensors(tensors))

    def raw(self, name: str, data: bytes) -> Model:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(data)
        return self

    def index(self, weight_map: object) -> Model:
        self.path(self.index_name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return self

    def two_files(self) -> Model:
        """A good checkpoint: two files and their index."""
        names = {EMBED[0]: FIRST, QUERY[0]: FIRST, HEAD[0]: SECOND}
        return self.config().file(FIRST, EMBED, QUERY).file(SECOND, HEAD).index(names)

    def one_file(self, *tensors: Tensor) -> Model:
        return self.config().file("model.safetensors", *(tensors or (EMBED,)))

    def hub(self, commit: str) -> Path:
        """A copy in the layout of a hub cache: snapshots/COMMIT/* are symlinks to blobs/*, large ones by SHA-256."""
        repository = self.directory.parent / "models--org--name"
        snapshot = repository / "snapshots" / commit
        for directory in (repository / "blobs", repository / "refs", snapshot):
            directory.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        for path in sorted(self.directory.iterdir()):
            data = path.read_bytes()
            kind = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
            blob = repository / "blobs" / kind(data).hexdigest()
            blob.write_bytes(data)
            (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
        return repository

    def again(self, directory: Path) -> Model:
        """A model in another directory, empty as yet."""
        return Model(directory)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


@pytest.fixture
def driver() -> FakeDriver:
    """A driver whose GPUs are ordinary memory."""
    return FakeDriver()


@pytest.fixture
def backend(driver: FakeDriver) -> CudaBackend:
    """The CUDA backend on its first GPU."""
    return CudaBackend(uuid(0), driver)
