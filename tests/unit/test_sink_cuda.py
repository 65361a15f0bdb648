# SPDX-License-Identifier: Apache-2.0
"""The CUDA sink over the fake driver, whose copies run late: staging that is reused too early would show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fake_cuda import GRANULARITY, FakeDriver, read
from safetensors.torch import save_file

from wcache.errors import OutOfMemory, SegmentError
from wcache.model import Placement, Sizes
from wcache.weights.checkpoint import open_checkpoint, survey
from wcache.weights.load import Filled, load
from wcache.weights.plan import plan_for
from wcache.weights.segment import Access
from wcache.weights.segment_cuda import CudaBackend, CudaSegment
from wcache.weights.segment_host import HostBackend
from wcache.weights.sharding import shard
from wcache.weights.sink import CHUNK_BYTES, STAGING_BYTES, Chunk, Copy, open_sink
from wcache.weights.sink_cuda import CudaSink


def put(sink: CudaSink, chunk: Chunk, data: bytes) -> None:
    landing = sink.land(chunk)
    position = 0
    for buffer in landing.buffers:
        buffer[:] = data[position : position + len(buffer)]
        position += len(buffer)
    landing.commit()


def plain(start: int, size: int, target: int, segment: int = 0) -> Copy:
    return Copy(start, 1, size, size, segment, target, size, "uint8", "uint8")


def filled(backend: CudaBackend, size: int, *chunks: tuple[Chunk, bytes]) -> bytes:
    """A segment's bytes after these chunks were brought there."""
    segment = backend.create("s", size)
    sink = open_sink(backend, [segment])
    assert isinstance(sink, CudaSink)
    try:
        for chunk, data in chunks:
            put(sink, chunk, data)
        sink.finish()
        return read(segment.memory())
    finally:
        sink.close()
        segment.close()


def test_pieces_land_where_they_belong_and_the_rest_of_a_chunk_nowhere(
    driver: FakeDriver, backend: CudaBackend
) -> None:
    data = os.urandom(1000)
    chunk = Chunk(0, 1000, (plain(0, 10, 50), plain(500, 100, 200)))
    got = filled(backend, 400, (chunk, data))
    assert got == bytes(50) + data[:10] + bytes(140) + data[500:600] + bytes(100)
    assert driver.live() == {}


def test_strided_rows_are_one_copy(driver: FakeDriver, backend: CudaBackend) -> None:
    data = os.urandom(64)
    rows = Copy(4, 5, 3, 12, 0, 0, 7, "uint8", "uint8")
    got = filled(backend, 31, (Chunk(0, 64, (rows,)), data))
    expected = bytearray(31)
    for i in range(5):
        expected[i * 7 : i * 7 + 3] = data[4 + i * 12 : 7 + i * 12]
    assert got == bytes(expected)
    assert driver.calls["copy_in_rows"] == 1 and driver.calls["copy_in"] == 0


def test_rows_that_are_dense_on_both_sides_are_a_plain_copy(driver: FakeDriver, backend: CudaBackend) -> None:
    data = os.urandom(60)
    assert filled(backend, 60, (Chunk(0, 60, (Copy(0, 6, 10, 10, 0, 0, 10, "uint8", "uint8"),)), data)) == data
    assert driver.calls["copy_in_rows"] == 0


@pytest.mark.parametrize(("dtype", "pitch"), [("float32", 16), ("float16", 8), ("float32", 32)])
def test_elements_are_cast_as_torch_casts_them(backend: CudaBackend, dtype: str, pitch: int) -> None:
    source = torch.randn(3, 8).to(torch.bfloat16)
    wanted = source[:, :4].to(getattr(torch, dtype))
    item = wanted.dtype.itemsize
    data = b"\xff" + source.view(torch.uint8).numpy().tobytes()  # elements at an odd byte
    got = filled(backend, 3 * pitch, (Chunk(0, 49, (Copy(1, 3, 8, 16, 0, 0, pitch, "bfloat16", dtype),)), data))
    for row in range(3):
        assert got[row * pitch : row * pitch + 4 * item] == wanted[row].view(torch.uint8).numpy().tobytes()


def test_many_chunks_go_through_a_ring_of_bounded_size(driver: FakeDriver, backend: CudaBackend) -> None:
    limit = STAGING_BYTES // CHUNK_BYTES
    pieces = [os.urandom(100) for _ in range(3 * limit)]
    chunks = [(Chunk(0, 100, (plain(0, 100, 100 * i),)), piece) for i, piece in enumerate(pieces)]
    assert filled(backend, 300 * limit, *chunks) == b"".join(pieces)
    assert driver.calls["pin"] == limit == driver.calls["unpin"]
    assert driver.live() == {}


def test_an_abandoned_landing_gives_its_staging_back(driver: FakeDriver, backend: CudaBackend) -> None:
    segment = backend.create("s", 10)
    sink = CudaSink(backend, [segment])
    for _ in range(2 * STAGING_BYTES // CHUNK_BYTES):
        sink.land(Chunk(0, 10, ())).abandon()
    sink.close()
    sink.close()
    segment.close()
    assert driver.calls["pin"] == 1
    assert driver.live() == {}


@pytest.mark.parametrize("step", ["event", "pin", "copy_in", "record"])
def test_a_step_that_fails_ends_the_load_and_leaves_nothing(
    driver: FakeDriver, backend: CudaBackend, step: str
) -> None:
    driver.fail(step)
    with pytest.raises(SegmentError, match="CUDA_ERROR_UNKNOWN"):
        filled(backend, 100, (Chunk(0, 100, (plain(0, 100, 0),)), bytes(100)))
    assert driver.live() == {}


# --- through the real reader ------------------------------------------------------------------------------------------


def make_checkpoint(directory: Path) -> Path:
    """A tiny Llama; `o_proj` and `down_proj` are split by columns, which is strided in the file."""
    torch.manual_seed(0)
    directory.mkdir()
    (directory / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,'
        ' "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 100,'
        ' "tie_word_embeddings": false, "torch_dtype": "bfloat16"}'
    )
    shapes = {
        "model.embed_tokens": (100, 64), "lm_head": (100, 64), "model.norm": (64,),
        "model.layers.0.input_layernorm": (64,), "model.layers.0.post_attention_layernorm": (64,),
        "model.layers.0.self_attn.q_proj": (64, 64), "model.layers.0.self_attn.k_proj": (64, 64),
        "model.layers.0.self_attn.v_proj": (64, 64), "model.layers.0.self_attn.o_proj": (64, 64),
        "model.layers.0.mlp.gate_proj": (128, 64), "model.layers.0.mlp.up_proj": (128, 64),
        "model.layers.0.mlp.down_proj": (64, 128),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def filled_from(directory: Path, backend: CudaBackend | HostBackend, dtype: str, rank: int) -> Filled:
    checkpoint = open_checkpoint(survey(directory))
    config = checkpoint.survey.config
    plan = shard(checkpoint, plan_for(config, None), Placement(Sizes(tp=2), rank), dtype)
    return load(checkpoint, plan, backend, hash_files=["model.safetensors"])


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loads_bytes_are_those_of_the_host_backend(
    tmp_path: Path, driver: FakeDriver, backend: CudaBackend, dtype: str, rank: int
) -> None:
    directory = make_checkpoint(tmp_path / "m")
    on_gpu, on_host = filled_from(directory, backend, dtype, rank), filled_from(directory, HostBackend(), dtype, rank)
    assert on_gpu.tensors == on_host.tensors and on_gpu.digests == on_host.digests
    host = [bytes(memoryview(s.memory())[: s.size]) for s in on_host.segments]  # type: ignore[arg-type]
    on_host.close()
    fds = on_gpu.seal()
    mapping = backend.map(fds, [s.size for s in on_gpu.specs], Access.READ)
    assert [read(mapping.memory(i)) for i in range(len(host))] == host
    assert [mapping.digest(i) for i in range(len(host))] == [s.digest for s in on_gpu.specs]
    mapping.close()
    for fd in fds:
        fd.close()
    assert driver.live(digesters=1) == {}


def test_a_shard_that_does_not_fit_allocates_nothing(tmp_path: Path, driver: FakeDriver, backend: CudaBackend) -> None:
    driver.open(0).capacity = GRANULARITY - 1
    with pytest.raises(OutOfMemory, match=f"{GRANULARITY - 1} of {GRANULARITY - 1} bytes are free"):
        filled_from(make_checkpoint(tmp_path / "m"), backend, "auto", 0)
    assert driver.calls["create"] == 0


@pytest.mark.parametrize("step", ["create", "map", "pin", "copy_in", "launch"])
def test_a_load_that_fails_at_any_step_leaves_nothing(
    tmp_path: Path, driver: FakeDriver, backend: CudaBackend, step: str
) -> None:
    driver.fail(step)
    with pytest.raises(SegmentError, match="CUDA_ERROR_UNKNOWN"):
        filled_from(make_checkpoint(tmp_path / "m"), backend, "auto", 0)
    driver.heal()
    assert driver.live(digesters=int(step == "launch")) == {}


def test_a_cuda_segment_is_what_the_sink_is_for(backend: CudaBackend) -> None:
    segment = backend.create("s", 1)
    assert isinstance(segment, CudaSegment)
    segment.close()
