# SPDX-License-Identifier: Apache-2.0
"""The one place that turns mapped memory into torch tensors. Runs in engines and in the loader child.

Each storage of a manifest becomes one torch storage of its own, so that `torch.compile` never takes two weights for
aliases; tensors that share a storage in the manifest share it here, names of one entry give the same object.
A tensor keeps the memory under it mapped; nothing has to be closed.
Surprising: `torch.frombuffer` keeps a reference to its object but no buffer export, so a bare `mmap` could be closed
under a living tensor. A memoryview in between keeps the export, and `mmap.close` is refused as it must be.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch

from wcache.errors import SegmentError
from wcache.model import CPU, Kind
from wcache.weights.manifest import Manifest, TensorSpec
from wcache.weights.segment import Mapping, Memory


class _CudaBytes:
    """Lets torch take device memory as it is, and holds `memory` for as long as torch's storage lives."""

    def __init__(self, memory: Any, offset: int, size: int) -> None:
        self.memory = memory
        # "data" says writable because torch refuses anything else; a read-only mapping still faults on a write.
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (memory.address + offset, False),
            "strides": None,
            "version": 3,
        }


def bytes_tensor(memory: Memory | memoryview, offset: int, size: int) -> torch.Tensor:
    """A uint8 tensor [size] with a storage of its own over bytes [offset, offset + size); keeps `memory` alive.

    Host memory is an `mmap` (or a memoryview of one), device memory has `address`, `size` and `device_index`.
    """
    if isinstance(memory, mmap.mmap | memoryview):
        view = memory if isinstance(memory, memoryview) else memoryview(memory)
        if offset < 0 or offset + size > view.nbytes:
            raise SegmentError(f"bytes [{offset}, {offset + size}) of a segment of {view.nbytes} bytes")
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with _read_only_is_meant(view.readonly):
            return torch.frombuffer(view, dtype=torch.uint8, count=size, offset=offset)
    device: Any = memory
    if offset < 0 or offset + size > device.size:
        raise SegmentError(f"bytes [{offset}, {offset + size}) of a segment of {device.size} bytes")
    where = torch.device("cuda", device.device_index)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=where)
    return torch.as_tensor(_CudaBytes(memory, offset, size), device=where)


@contextmanager
def _read_only_is_meant(read_only: bool) -> Iterator[None]:
    """torch warns of buffers that are not writable; a read-only mapping was asked for, so that is no news."""
    if not read_only:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield


def storages(manifest: Manifest, mapping: Mapping) -> list[torch.Tensor]:
    """One uint8 tensor for each storage of the manifest, over the mapping; of what the host keeps, a private copy."""
    memories = [mapping.memory(i) for i in range(len(manifest.segments))]
    if manifest.device == CPU:
        return _host_storages(manifest, [memoryview(cast(mmap.mmap, m)) for m in memories])
    empty = torch.empty(0, dtype=torch.uint8, device=torch_device(manifest.device))
    found = []
    for s in manifest.storages:
        base = bytes_tensor(memories[s.segment], s.offset, s.size) if s.size else empty.clone()
        found.append(base.cpu() if s.host else base)
    return found


def _host_storages(manifest: Manifest, views: list[memoryview]) -> list[torch.Tensor]:
    """One memoryview a segment and little work a storage, of which there may be 100,000; torch checks the bounds."""
    take, uint8 = torch.frombuffer, torch.uint8
    with _read_only_is_meant(any(v.readonly for v in views)):
        return [
            take(views[s.segment], dtype=uint8, count=s.size, offset=s.offset)
            if s.size
            else torch.empty(0, dtype=torch.uint8, device="cpu")
            for s in manifest.storages
        ]


def view(base: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor that `spec` describes over the storage of `base`: dtype, shape, strides and offset exactly."""
    tensor = torch.empty(0, dtype=dtype_of(spec.dtype), device=base.device)
    return tensor.set_(base.untyped_storage(), spec.storage_offset, spec.shape, spec.stride)


def wrap(manifest: Manifest, mapping: Mapping) -> dict[str, torch.Tensor]:
    """Every name of the manifest to its tensor over the mapping."""
    return build(manifest, storages(manifest, mapping))


def copy(manifest: Manifest, mapping: Mapping) -> dict[str, torch.Tensor]:
    """As `wrap`, over private memory: each storage cloned once, ties and shared storages kept."""
    return build(manifest, [base.clone() for base in storages(manifest, mapping)])


def tensors_of(manifest: Manifest, mapping: Mapping, *, copy: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Every name to its tensor, and the bytes of private copies: all of them, or those without a parameter in them."""
    shared = {t.storage for t in manifest.tensors if t.kind is Kind.PARAMETER} if not copy else set()
    bases = storages(manifest, mapping)
    private = [i for i, base in enumerate(bases) if i not in shared and base.numel()]
    for i in private:
        if not manifest.storages[i].host:  # which is a copy already
            bases[i] = bases[i].clone()
    return build(manifest, bases), sum(bases[i].numel() for i in private)


def build(manifest: Manifest, bases: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every name of the manifest to its tensor over the given storages (uint8 tensors, one each)."""
    with torch.no_grad():
        tensors: dict[str, torch.Tensor] = {}
        for spec in manifest.tensors:
            tensor = view(bases[spec.storage], spec)
            for name in spec.names:
                tensors[name] = tensor
        return tensors


@cache
def dtype_of(name: str) -> torch.dtype:
    """torch's dtype by its name without the prefix. Raises SegmentError for one this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SegmentError(f"torch {torch.__version__} has no dtype {name}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_device(device: str) -> torch.device:
    """torch's device for "cpu" or a GPU's UUID. Raises SegmentError for a GPU that this process does not see."""
    if device == CPU:
        return torch.device(CPU)
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(index) == device:
            return torch.device("cuda", index)
    raise SegmentError(f"device {device} is not visible here", hint="CUDA_VISIBLE_DEVICES hides it")


def gpu_uuid(index: int) -> str:
    """The UUID of a visible GPU, as CUDA gives it (a MIG instance has one of its own)."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid).removeprefix("GPU-")
    return f"{'MIG' if ' MIG ' in properties.name else 'GPU'}-{uuid}"
