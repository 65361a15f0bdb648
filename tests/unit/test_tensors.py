# SPDX-License-Identifier: Apache-2.0
"""Live tensors into segments and back, without a daemon: bytes, shapes, strides, dtypes, ties and shared storages."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wcache.engine import publish, tensors
from wcache.engine.entries import Entry, blocks, check
from wcache.engine.state import module_entries, state_entries
from wcache.errors import PublishError, SegmentError
from wcache.host.fds import OwnedFd, close_all
from wcache.model import BackendName, Kind, Origin
from wcache.weights.fingerprint import Fingerprint, LayoutKey
from wcache.weights.layout import pack
from wcache.weights.manifest import VERSION, Manifest, StorageSpec, decode, encode
from wcache.weights.segment import Access
from wcache.weights.segment_host import HostBackend, HostMapping

LAYOUT = LayoutKey(engine="test", engine_version="1", architecture="any", dtype="any")


@contextmanager
def published(
    entries: list[Entry], *, limit: int = 4096, access: Access = Access.READ_WRITE
) -> Iterator[tuple[Manifest, HostMapping]]:
    """What an engine that attaches would have of these entries; small segments, so that there are several."""
    backend, found, fds = HostBackend(), blocks(entries), list[OwnedFd]()
    packing = pack([b.size for b in found], backend.granularity, limit)
    storages = tuple(StorageSpec(s, o, b.size) for (s, o), b in zip(packing.places, found, strict=True))
    try:
        specs = tuple(
            publish._fill(
                backend,
                f"s{i}",
                size,
                [(b, s) for b, s in zip(found, storages, strict=True) if s.size and s.segment == i],
                fds,
            )
            for i, size in enumerate(packing.segments)
        )
        manifest = Manifest(
            version=VERSION, fingerprint=Fingerprint("0" * 64, LAYOUT), rank=0, backend=BackendName.HOST, device="cpu",
            origin=Origin.ENGINE, model="m", created=0.0, segments=specs, storages=storages,
            tensors=tuple(publish._tensor_specs(found)),
        )  # fmt: skip
        mapping = backend.map(fds, [s.size for s in specs], access)
    finally:
        close_all(fds)
    yield decode(encode(manifest)), mapping
    mapping.close()


def raw(tensor: torch.Tensor) -> bytes:
    return (
        bytes(tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).tolist())
        if tensor.numel()
        else b""
    )


def same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert raw(mine) == raw(theirs)


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16,
]  # fmt: skip


@st.composite
def states(draw: Any) -> dict[str, torch.Tensor]:
    """Tensors of odd dtypes and shapes, transposed, sliced, strided, expanded, empty, scalar, and tied."""
    state: dict[str, torch.Tensor] = {}
    for i in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        base = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
        state[f"t{i}"] = base
        if len(shape) >= 2 and draw(st.booleans()):
            state[f"t{i}.t"] = base.transpose(0, 1)
        if shape and shape[0] > 1 and draw(st.booleans()):
            state[f"t{i}.rows"] = base[1:]
            state[f"t{i}.steps"] = base[::2]
        if draw(st.booleans()):
            state[f"t{i}.tied"] = base
    state["expanded"] = torch.rand(1, 3).expand(4, 3)
    return state


@settings(max_examples=80, deadline=None)
@given(states())
def test_every_tensor_comes_back_exactly_and_what_shared_memory_still_does(state: dict[str, torch.Tensor]) -> None:
    with published(state_entries(state)) as (manifest, mapping):
        mine = tensors.wrap(manifest, mapping)
        assert mine.keys() == state.keys()
        for name, tensor in state.items():
            same(mine[name], tensor)
        assert shared(mine) == shared(state)
        assert manifest.weight_bytes <= sum(s.aligned_size for s in manifest.segments)
        copies = tensors.copy(manifest, mapping)
        for name, tensor in state.items():
            same(copies[name], tensor)
        assert shared(copies) == shared(state)
        del mine


def shared(state: Mapping[str, torch.Tensor]) -> set[tuple[str, str]]:
    """Pairs of names whose first elements lie in the same memory, overlapping."""
    spans = {n: (t.data_ptr(), t.data_ptr() + reach(t)) for n, t in state.items() if t.numel()}
    return {(a, b) for a, (s, e) in spans.items() for b, (t, f) in spans.items() if s < f and t < e}


def reach(t: torch.Tensor) -> int:
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def test_each_tensor_has_a_storage_of_its_own() -> None:
    state = {f"t{i}": torch.full((i + 1,), i, dtype=torch.int32) for i in range(200)}
    with published(state_entries(state), limit=2048) as (manifest, mapping):
        mine = tensors.wrap(manifest, mapping)
        assert len({t.untyped_storage().data_ptr() for t in mine.values()}) == 200
        assert all(t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.nbytes for t in mine.values())
        assert all(t.data_ptr() % 256 == 0 for t in mine.values())
        for name, tensor in state.items():
            same(mine[name], tensor)
        del mine


def test_names_of_one_tensor_are_one_object() -> None:
    module = nn.Module()
    module.a = nn.Linear(3, 3)
    module.b = nn.Linear(3, 3)
    module.b.weight = module.a.weight
    with published(module_entries(module)) as (manifest, mapping):
        mine = tensors.wrap(manifest, mapping)
        assert mine["a.weight"] is mine["b.weight"]
        assert manifest.weight_bytes == 3 * 3 * 4 + 2 * 3 * 4
        del mine


def test_ties_survive_a_state_dict() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    (tied,) = [e for e in state_entries(module.state_dict()) if len(e.names) > 1]
    assert tied.names == ("0.weight", "1.weight")


def test_a_tensor_keeps_its_memory_mapped_and_lets_go_of_it() -> None:
    with published(state_entries({"x": torch.arange(5)})) as (manifest, mapping):
        tensor = tensors.wrap(manifest, mapping)["x"]
        memory: list[weakref.ref[mmap.mmap]] = [weakref.ref(mapping.memory(0))]
        mapping.close()
        gc.collect()
        assert memory[0]() is not None
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        del tensor
        gc.collect()
        assert memory[0]() is None


def test_a_mapping_under_a_living_tensor_cannot_be_pulled_away() -> None:
    memory = mmap.mmap(-1, 4096)
    tensor = tensors.bytes_tensor(memory, 0, 8)
    with pytest.raises(BufferError):
        memory.close()
    tensor.fill_(1)
    del tensor
    memory.close()


def test_read_only_memory_gives_tensors_without_a_warning() -> None:
    with published(state_entries({"x": torch.arange(5)}), access=Access.READ) as (manifest, mapping):
        mine = tensors.wrap(manifest, mapping)
        assert mine["x"].tolist() == [0, 1, 2, 3, 4]
        del mine


def test_bytes_outside_the_memory_are_refused() -> None:
    memory = mmap.mmap(-1, 4096)
    with pytest.raises(SegmentError, match="4096 bytes"):
        tensors.bytes_tensor(memory, 4000, 100)
    with pytest.raises(SegmentError):
        tensors.bytes_tensor(memory, -1, 10)
    memory.close()


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "not strided"),
        ((torch.ones(2, requires_grad=True) * 2), "autograd graph"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "lazy view"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_by_name(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(PublishError, match=f"layer.x cannot be published: .*{why}"):
        check([Entry(("layer.x",), Kind.PARAMETER, tensor)], repoint=False)


def test_what_is_trained_is_not_moved_onto_shared_memory() -> None:
    entries = module_entries(nn.Linear(2, 2))
    check(entries, repoint=False)
    with pytest.raises(PublishError, match="requires grad"):
        check(entries, repoint=True)


def test_a_slice_takes_only_its_own_bytes_along() -> None:
    big = torch.arange(100_000, dtype=torch.int32)
    with published(state_entries({"x": big[50_000:50_008]}), limit=1 << 20) as (manifest, mapping):
        assert manifest.weight_bytes <= 8 * 4 + 16
        same(tensors.wrap(manifest, mapping)["x"], big[50_000:50_008])


def test_a_weight_elsewhere_than_the_ranks_memory_is_refused_by_name_and_a_small_thing_on_the_host_is_not() -> None:
    gpu, here = torch.device("cuda", 0), torch.zeros(2)
    check([Entry(("scale",), Kind.ATTRIBUTE, here), Entry(("mask",), Kind.BUFFER, here)], repoint=True, device=gpu)
    with pytest.raises(PublishError, match=r"layer\.weight cannot be published: it is on cpu, the rank's .* cuda:0"):
        check([Entry(("layer.weight",), Kind.PARAMETER, here)], repoint=True, device=gpu)
