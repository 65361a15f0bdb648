# SPDX-License-Identifier: Apache-2.0
"""Reading a shard into segments: the right bytes, few reads, bounded memory, and nothing left after a failure."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from wcache.errors import CheckpointError, OutOfMemory, SegmentError
from wcache.model import CheckpointFault, Placement, Sizes
from wcache.weights import reader
from wcache.weights.checkpoint import Checkpoint, open_checkpoint, survey
from wcache.weights.chunks import chunks
from wcache.weights.load import Filled, load
from wcache.weights.manifest import ALIGNMENT
from wcache.weights.plan import plan_for
from wcache.weights.segment_host import HostBackend, HostSegment
from wcache.weights.sharding import ShardPlan, shard
from wcache.weights.sink import CHUNK_BYTES, Copy

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512,
    "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048,
}  # fmt: skip


def write(directory: Path, files: Sequence[dict[str, torch.Tensor]], config: dict[str, Any] | None = None) -> Path:
    """A checkpoint directory with one file for each dict of tensors, and an index if there are several."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"architectures": ["Any"], "model_type": "any"}))
    if len(files) == 1:
        save_file(files[0], directory / "model.safetensors")
        return directory
    weight_map = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def llama(config: dict[str, Any] = LLAMA, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv, v = config["num_attention_heads"] * d, config["num_key_value_heads"] * d, config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h), "lm_head.weight": (v, h)}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {
            f"{p}self_attn.q_proj.weight": (q, h), f"{p}self_attn.k_proj.weight": (kv, h),
            f"{p}self_attn.v_proj.weight": (kv, h), f"{p}self_attn.o_proj.weight": (h, q),
            f"{p}mlp.gate_proj.weight": (i, h), f"{p}mlp.up_proj.weight": (i, h), f"{p}mlp.down_proj.weight": (h, i),
            f"{p}input_layernorm.weight": (h,), f"{p}post_attention_layernorm.weight": (h,),
        }  # fmt: skip
    shapes["model.norm.weight"] = (h,)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    half = len(tensors) // 2
    items = list(tensors.items())
    return [dict(items[:half]), dict(items[half:])]


def plan(model: Checkpoint, sizes: Sizes = Sizes(), rank: int = 0, dtype: str = "auto") -> ShardPlan:  # noqa: B008
    return shard(model, plan_for(model.survey.config, None), Placement(sizes, rank), dtype)


def tensors(filled: Filled) -> dict[str, torch.Tensor]:
    """Copies of what the segments hold, by name."""
    found = {}
    for spec in filled.tensors:
        storage = filled.storages[spec.storage]
        raw = bytearray()
        if storage.size:
            memory = filled.segments[storage.segment].memory()
            assert isinstance(memory, mmap.mmap)
            raw = bytearray(memory[storage.offset : storage.offset + storage.size])
        dtype = getattr(torch, spec.dtype)
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        for name in spec.names:
            found[name] = flat.reshape(spec.shape)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_every_tensor_has_the_bytes_that_safetensors_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    first = {f"t{i}": torch.randint(0, 2, (i + 1, 5)).to(dtype) for i, dtype in enumerate(dtypes)}
    second = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 7), "big": torch.randn(3_000_001)}
    model = open_checkpoint(survey(write(tmp_path / "m", [first, second])))
    filled = load(model, plan(model), HostBackend())
    try:
        found = tensors(filled)
        expected = {k: v for f in model.survey.files for k, v in load_file(f.path).items()}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        assert all(s.offset % ALIGNMENT == 0 for s in filled.storages)
    finally:
        filled.close()


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
@pytest.mark.parametrize("hashed", [False, True])
def test_shards_of_two_ranks_are_the_slices_and_casts_that_torch_makes(
    tmp_path: Path, dtype: str, hashed: bool
) -> None:
    files = llama()
    model = open_checkpoint(survey(write(tmp_path / "m", files, LLAMA)))
    whole = files[0] | files[1]
    names = [f.name for f in model.survey.files] if hashed else []
    for rank in range(2):
        filled = load(model, plan(model, Sizes(tp=2), rank, dtype), HostBackend(), hash_files=names)
        try:
            found = tensors(filled)
            assert found.keys() == whole.keys()
            for name, tensor in whole.items():
                if "norm" not in name:
                    tensor = tensor.chunk(2, 1 if "o_proj" in name or "down_proj" in name else 0)[rank]
                if dtype != "auto":
                    tensor = tensor.to(getattr(torch, dtype))
                assert same(found[name], tensor.contiguous()), name
            for file in model.survey.files:
                if hashed:
                    assert filled.digests[file.name] == hashlib.sha256(file.path.read_bytes()).hexdigest()
        finally:
            filled.close()


def test_a_file_is_hashed_even_if_this_rank_needs_nothing_of_it(tmp_path: Path) -> None:
    files = llama()
    first = {
        k: v for f in files for k, v in f.items() if "layers.1" not in k and "lm_head" not in k and "norm.w" not in k
    }
    rest = {k: v for f in files for k, v in f.items() if k not in first}
    rest |= {k: first.pop(k) for k in list(first) if "layernorm" in k}
    model = open_checkpoint(survey(write(tmp_path / "m", [rest, first], LLAMA)))
    filled = load(model, plan(model, Sizes(pp=2), 1), HostBackend(), hash_files=[f.name for f in model.survey.files])
    try:
        for file in model.survey.files:
            assert filled.digests[file.name] == hashlib.sha256(file.path.read_bytes()).hexdigest()
    finally:
        filled.close()


def test_sealed_segments_hold_what_was_digested(tmp_path: Path) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))
    backend = HostBackend()
    filled = load(model, plan(model), backend)
    specs = filled.specs
    fds = filled.seal()
    mapping = backend.map(fds, [s.size for s in specs])
    assert [mapping.digest(i) for i in range(len(specs))] == [s.digest for s in specs]
    mapping.close()
    for fd in fds:
        fd.close()


def test_tied_names_share_one_storage(tmp_path: Path) -> None:
    files = llama()
    del files[0]["lm_head.weight"]
    config = {**LLAMA, "tie_word_embeddings": True}
    model = open_checkpoint(survey(write(tmp_path / "m", files, config)))
    filled = load(model, plan(model), HostBackend())
    assert ("model.embed_tokens.weight", "lm_head.weight") in [t.names for t in filled.tensors]
    assert sum(s.size for s in filled.storages) == sum(t.nbytes for f in files for t in f.values())
    filled.close()


# --- reads ------------------------------------------------------------------------------------------------------------


def test_three_thousand_small_tensors_take_few_reads_and_no_byte_twice(tmp_path: Path) -> None:
    small = {f"layer.{i}.weight": torch.full((64, 8), float(i)) for i in range(3000)}
    model = open_checkpoint(survey(write(tmp_path / "m", [small])))
    shard_plan = plan(model)
    filled = load(model, shard_plan, HostBackend())
    assert filled.tally.reads <= 10
    assert filled.tally.bytes_read == shard_plan.nbytes
    filled.close()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_reads_its_extents_and_hardly_more(tmp_path: Path, tp: int) -> None:
    """What is needed of a row-parallel weight are its rows: runs of a few hundred bytes are no extents of their own."""
    files = llama()
    model = open_checkpoint(survey(write(tmp_path / "m", files, LLAMA)))
    shard_plan = plan(model, Sizes(tp=tp), 0)
    needed = 0
    for tensor in shard_plan.tensors:
        row_parallel = "o_proj" in tensor.names[0] or "down_proj" in tensor.names[0]
        needed += tensor.nbytes * (tp if row_parallel else 1)
    filled = load(model, shard_plan, HostBackend())
    assert filled.tally.bytes_read <= 1.05 * needed
    assert filled.tally.reads <= 60
    filled.close()


def test_many_equal_gaps_are_not_read_along(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[[rule]]\ntensor = "*"\nkind = "column"\n')
    weights = {f"t{i}": torch.zeros(128, 512) for i in range(60)}
    model = open_checkpoint(survey(write(tmp_path / "m", [weights])))
    shard_plan = shard(model, plan_for({}, path), Placement(Sizes(tp=2), 1))
    filled = load(model, shard_plan, HostBackend())
    assert filled.tally.bytes_read <= 1.05 * shard_plan.nbytes
    filled.close()


def test_large_files_are_read_in_large_pieces(tmp_path: Path) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", [{f"t{i}": torch.zeros(5 << 20) for i in range(6)}])))
    filled = load(model, plan(model), HostBackend())
    assert filled.tally.bytes_read / filled.tally.reads >= 8 << 20
    filled.close()


def test_long_rows_of_a_row_parallel_weight_are_read_without_the_columns_of_others(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('default = "replicate"\n[[rule]]\ntensor = "wide"\nkind = "row"\n')
    wide = torch.arange(4 * (1 << 19)).reshape(4, 1 << 19).float()
    model = open_checkpoint(survey(write(tmp_path / "m", [{"wide": wide}])))
    shard_plan = shard(model, plan_for({}, path), Placement(Sizes(tp=2), 1))
    filled = load(model, shard_plan, HostBackend())
    assert filled.tally.bytes_read == wide.nbytes // 2
    assert same(tensors(filled)["wide"], wide.chunk(2, 1)[1].contiguous())
    filled.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_thousands_of_short_rows_are_split_as_torch_splits_them(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[[rule]]\ntensor = "*"\nkind = "row"\n')
    raw = {n: torch.randint(0, 255, (rows, 24), dtype=torch.uint8) for n, rows in (("a", 5000), ("b", 3), ("c", 3000))}
    weights = {name: tensor.view(dtype) for name, tensor in raw.items()}
    model = open_checkpoint(survey(write(tmp_path / "m", [weights])))
    for rank in range(3):
        shard_plan = shard(model, plan_for({}, path), Placement(Sizes(tp=3), rank))
        filled = load(model, shard_plan, HostBackend(), hash_files=["model.safetensors"])
        found = tensors(filled)
        for name, tensor in raw.items():
            mine = found[name].view(torch.uint8)
            assert torch.equal(mine, tensor.chunk(3, 1)[rank]), name
        filled.close()


@st.composite
def file_copies(draw: st.DrawFn) -> tuple[list[Copy], int]:
    """Copies of a file that do not overlap, and its size."""
    position, copies, target = draw(st.integers(0, 3000)), [], 0
    for _ in range(draw(st.integers(0, 8))):
        item = draw(st.sampled_from([1, 2, 4]))
        rows, run = draw(st.integers(1, 4)), item * draw(st.sampled_from([1, 3, 500, 1 << 18, (5 << 20) + 1]))
        pitch = run + item * draw(st.sampled_from([0, 1, 700, 1 << 19]))
        dtype = {1: "uint8", 2: "float16", 4: "float32"}[item]
        copies.append(Copy(position, rows, run, pitch, 0, target, run, dtype, dtype))
        target += rows * run
        position += (rows - 1) * pitch + run + draw(st.sampled_from([0, 1, 5000, 1 << 21, 20 << 20]))
    return copies, position + draw(st.integers(0, 40 << 20))


def placed(copies: Sequence[Copy], base: int) -> list[tuple[int, int, int]]:
    """(file offset, target, length) of every run, neighbours joined."""
    runs = sorted(
        (base + c.start + r * c.pitch, c.target + r * c.target_pitch, c.run) for c in copies for r in range(c.rows)
    )
    joined: list[tuple[int, int, int]] = []
    for start, target, length in runs:
        if joined and joined[-1][0] + joined[-1][2] == start and joined[-1][1] + joined[-1][2] == target:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + length)
        else:
            joined.append((start, target, length))
    return joined


@given(drawn=file_copies(), whole=st.booleans())
def test_chunks_carry_every_run_once_and_stay_within_their_size(drawn: tuple[list[Copy], int], whole: bool) -> None:
    copies, size = drawn
    cut = chunks(copies, size if whole else None)
    runs = [run for chunk in cut for run in placed(chunk.copies, chunk.offset)]
    rejoined = placed([Copy(s, 1, n, n, 0, t, n, "uint8", "uint8") for s, t, n in runs], 0)
    assert rejoined == placed(copies, 0)
    position = 0
    for chunk in cut:
        assert 0 < chunk.size <= CHUNK_BYTES
        assert chunk.offset >= position
        if whole:
            assert chunk.offset == position
        position = chunk.offset + chunk.size
        inside = 0
        for copy in chunk.copies:
            assert inside <= copy.start
            inside = copy.start + copy.span
        assert inside <= chunk.size
    assert position == size if whole else position <= size


# --- progress and threads ---------------------------------------------------------------------------------------------


def test_progress_ends_with_everything_done_and_comes_from_the_callers_thread(tmp_path: Path) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))
    seen: list[tuple[int, int, int, int]] = []
    threads = set()

    def progress(*, bytes_done: int, bytes_total: int, files_done: int, files_total: int) -> None:
        threads.add(threading.current_thread())
        seen.append((bytes_done, bytes_total, files_done, files_total))

    filled = load(model, plan(model), HostBackend(), progress=progress, threads=2)
    filled.close()
    assert seen[-1] == (filled.tally.bytes_read, filled.tally.bytes_read, 2, 2)
    assert seen == sorted(seen)
    assert threads == {threading.current_thread()}


def test_an_error_in_the_progress_callback_ends_the_load_and_leaves_nothing(tmp_path: Path) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))

    def progress(**_: int) -> None:
        raise RuntimeError("the daemon went away")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RuntimeError, match="the daemon went away"):
        load(model, plan(model), HostBackend(), progress=progress)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("wcache-")]


# --- failures ---------------------------------------------------------------------------------------------------------


class Watched(HostBackend):
    """A host backend that remembers its segments and can break."""

    def __init__(self, free: int | None = None, fail_at: int | None = None) -> None:
        self.made: list[HostSegment] = []
        self._free, self._fail_at = free, fail_at

    def available(self) -> int:
        return super().available() if self._free is None else self._free

    def create(self, name: str, size: int) -> HostSegment:
        if len(self.made) == self._fail_at:
            raise SegmentError("no more")
        self.made.append(super().create(name, size))
        return self.made[-1]

    def all_closed(self) -> bool:
        return all(segment.memory().closed for segment in self.made)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def rewrite(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"x")


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("change", [truncate, rewrite, replace])
def test_a_file_that_changed_after_its_header_was_checked_is_refused(
    tmp_path: Path, change: Callable[[Path], None], hashed: bool
) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))
    change(model.survey.files[1].path)
    backend = Watched()
    with pytest.raises(CheckpointError) as error:
        load(model, plan(model), backend, hash_files=[f.name for f in model.survey.files] if hashed else [])
    assert error.value.fault is CheckpointFault.CHANGED_WHILE_READING
    assert model.survey.files[1].name in str(error.value)
    assert backend.made
    assert backend.all_closed()


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(
    ("change", "fault"),
    [(truncate, CheckpointFault.TRUNCATED), (os.utime, CheckpointFault.CHANGED_WHILE_READING)],
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path,
    change: Callable[[Path], None],
    fault: CheckpointFault,
    hashed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", [{"a": torch.zeros(9 << 20)}])))
    path, preadv, calls = model.survey.files[0].path, os.preadv, iter(range(1000))

    def after_the_first(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(calls) == 1:
            change(path)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(reader.os, "preadv", after_the_first)
    backend = Watched()
    with pytest.raises(CheckpointError) as error:
        load(model, plan(model), backend, threads=1, hash_files=["model.safetensors"] if hashed else [])
    assert error.value.fault is fault
    assert backend.all_closed()


def test_a_read_error_names_file_and_place_and_unwinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))

    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader.os, "preadv", broken)
    backend = Watched()
    with pytest.raises(CheckpointError, match=r"read \d+ bytes at \d+ of model-.*Input/output error") as error:
        load(model, plan(model), backend)
    assert error.value.fault is CheckpointFault.UNREADABLE
    assert backend.all_closed()


def test_short_counts_from_the_kernel_are_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = llama()
    model = open_checkpoint(survey(write(tmp_path / "m", files, LLAMA)))
    preadv = os.preadv

    def stingy(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][: min(len(buffers[0]), 70_001)]], offset)

    monkeypatch.setattr(reader.os, "preadv", stingy)
    filled = load(model, plan(model, Sizes(tp=2), 1), HostBackend())
    found = tensors(filled)
    assert same(
        found["model.layers.0.mlp.up_proj.weight"], (files[0] | files[1])["model.layers.0.mlp.up_proj.weight"][512:]
    )
    filled.close()


def test_memory_is_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))
    backend = Watched(free=1000)
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes on cpu: 1000 of \d+ bytes are available"):
        load(model, plan(model), backend)
    assert not backend.made


def test_an_allocation_that_fails_frees_the_segments_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wcache.weights.layout.SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr("wcache.weights.layout.pack.__defaults__", (1 << 20,))
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))
    backend = Watched(fail_at=3)
    with pytest.raises(SegmentError, match="no more"):
        load(model, plan(model), backend)
    assert len(backend.made) == 3
    assert backend.all_closed()


def test_a_file_to_hash_that_the_checkpoint_lacks_is_a_defect_of_the_caller(tmp_path: Path) -> None:
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        load(model, plan(model), HostBackend(), hash_files=["other.safetensors"])


# --- memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from wcache.model import Placement, Sizes
from wcache.weights.checkpoint import open_checkpoint, survey
from wcache.weights.load import load
from wcache.weights.segment_host import HostBackend
from wcache.weights.plan import plan_for
from wcache.weights.sharding import shard

def anonymous_peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

model = open_checkpoint(survey(Path(sys.argv[1])))
plan = shard(model, plan_for(model.survey.config, Path(sys.argv[2])), Placement(Sizes(tp=2), 0))
before = anonymous_peak()
names = [f.name for f in model.survey.files]
filled = load(model, plan, HostBackend(), hash_files=names, keep_page_cache=False)
print(plan.nbytes, anonymous_peak() - before, "torch" in sys.modules)
filled.close()
"""


def test_peak_memory_is_the_shard_and_bounded_staging_and_torch_is_not_imported(tmp_path: Path) -> None:
    plan_path = tmp_path / "plan.toml"
    plan_path.write_text('[[rule]]\ntensor = "*"\nkind = "row"\n')
    files = [{f"t{i}.{j}": torch.zeros(4096, 4096, dtype=torch.bfloat16) for j in range(4)} for i in range(4)]
    directory = write(tmp_path / "m", files)
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(directory), str(plan_path)], check=True, capture_output=True, text=True
    ).stdout.split()
    shard_bytes, peak = int(out[0]), int(out[1])
    assert shard_bytes == 256 << 20
    assert peak <= shard_bytes + (4 * 2 * CHUNK_BYTES) + (32 << 20)
    assert out[2] == "False"


def test_the_page_cache_is_given_back_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    fadvise = os.posix_fadvise

    def remember(fd: int, offset: int, length: int, advice: int) -> None:
        asked.append(advice)
        fadvise(fd, offset, length, advice)

    monkeypatch.setattr(reader.os, "posix_fadvise", remember)
    model = open_checkpoint(survey(write(tmp_path / "m", llama(), LLAMA)))
    load(model, plan(model), HostBackend()).close()
    assert os.POSIX_FADV_DONTNEED not in asked
    load(model, plan(model), HostBackend(), keep_page_cache=False).close()
    assert asked.count(os.POSIX_FADV_DONTNEED) == 2
