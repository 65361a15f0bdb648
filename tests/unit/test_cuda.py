# SPDX-License-Identifier: Apache-2.0
"""The driver behind cuda-bindings: what the binding answers becomes values or errors that name operation and object."""

from __future__ import annotations

import enum
import sys
import uuid
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from wcache.errors import BackendError, OutOfMemory, SegmentError
from wcache.host import cuda
from wcache.host.cuda import CudaDriver, open_driver


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100


OK = Result.CUDA_SUCCESS
CHIP = uuid.UUID("01234567-89ab-cdef-0123-456789abcdef")


class Names:
    """Any constant of an enum is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class Api(SimpleNamespace):
    """A stand-in for cuda.bindings.driver: records the stack of contexts that each call found."""

    def __init__(self, **more: Any) -> None:
        self.contexts: list[str] = []
        self.seen: list[tuple[str, list[str]]] = []
        names = {n: Names() for n in (
            "CUdevice_attribute", "CUmemAllocationHandleType", "CUmemAllocationType", "CUmemLocationType",
            "CUmemAllocationGranularity_flags", "CUmemAccess_flags",
        )}  # fmt: skip
        calls = {
            "cuInit": lambda _: (OK,),
            "cuDriverGetVersion": lambda: (OK, 13000),
            "cuDeviceGetCount": lambda: (OK, 1),
            "cuDeviceGet": lambda i: (OK, i),
            "cuDeviceGetUuid": lambda _: (OK, SimpleNamespace(bytes=CHIP.bytes)),
            "cuDeviceGetName": lambda *_: (OK, b"Some GPU\0\0\0"),
            "cuDeviceGetAttribute": lambda *_: (OK, 1),
            "cuDevicePrimaryCtxRetain": lambda _: (OK, "primary"),
            "cuCtxPushCurrent": self.push,
            "cuCtxPopCurrent": self.pop,
            "CUmemAllocationProp": lambda: SimpleNamespace(location=SimpleNamespace()),
            "cuMemGetAllocationGranularity": lambda *_: (OK, 2 << 20),
            "cuMemGetInfo": lambda: self.note("info", (OK, 5, 9)),
        }
        super().__init__(**{**names, **calls, **more})

    def push(self, context: str) -> tuple[Result]:
        self.contexts.append(context)
        return (OK,)

    def pop(self) -> tuple[Result, str]:
        return OK, self.contexts.pop()

    def note(self, call: str, answer: Any) -> Any:
        self.seen.append((call, list(self.contexts)))
        return answer


def test_a_device_is_named_by_the_uuid_that_cuda_gives() -> None:
    (info,) = CudaDriver(Api()).devices()
    assert (info.index, info.uuid, info.name) == (0, f"GPU-{CHIP}", "Some GPU")
    assert info.can_map and info.can_share


def test_a_mig_instance_is_told_by_its_name_and_the_second_uuid_call_is_preferred() -> None:
    other = uuid.uuid4()
    api = Api(
        cuDeviceGetName=lambda *_: (OK, b"NVIDIA H200 MIG 1g.18gb\0"),
        cuDeviceGetUuid_v2=lambda _: (OK, SimpleNamespace(bytes=other.bytes)),
    )
    assert CudaDriver(api).devices()[0].uuid == f"MIG-{other}"


def test_every_call_runs_in_the_devices_context_and_leaves_the_threads_own_alone() -> None:
    api = Api()
    api.contexts.append("the engine's")
    gpu = CudaDriver(api).open(0)
    assert gpu.free_and_total() == (5, 9)
    assert api.seen == [("info", ["the engine's", "primary"])]
    assert api.contexts == ["the engine's"]


def test_a_gpu_is_opened_once() -> None:
    driver = CudaDriver(Api())
    assert driver.open(0) is driver.open(0)


def test_a_failed_call_names_operation_object_and_result_and_leaves_the_context() -> None:
    api = Api(cuMemUnmap=lambda *_: (Result.CUDA_ERROR_INVALID_VALUE,))
    with pytest.raises(SegmentError, match=r"^unmap segment 3 of rank 1: CUDA_ERROR_INVALID_VALUE$"):
        CudaDriver(api).open(0).unmap(0, 1, "segment 3 of rank 1")
    assert api.contexts == []


def test_out_of_memory_is_its_own_error() -> None:
    api = Api(cuMemCreate=lambda *_: (Result.CUDA_ERROR_OUT_OF_MEMORY, None))
    with pytest.raises(OutOfMemory, match="create segment 0"):
        CudaDriver(api).open(0).create(1, "segment 0")


def test_no_gpu_is_a_backend_error_with_a_hint() -> None:
    with pytest.raises(BackendError, match="CUDA_ERROR_NO_DEVICE") as error:
        CudaDriver(Api(cuInit=lambda _: (Result.CUDA_ERROR_NO_DEVICE,)))
    assert "nvidia-smi" in error.value.hint


def test_no_driver_library_is_a_backend_error_with_a_hint() -> None:
    def missing(_: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(BackendError, match=r"libcuda\.so\.1") as error:
        CudaDriver(Api(cuInit=missing))
    assert "driver installed" in error.value.hint


def test_an_old_driver_is_refused_with_both_versions() -> None:
    with pytest.raises(BackendError, match=r"CUDA 11\.0.*at least 11\.2"):
        CudaDriver(Api(cuDriverGetVersion=lambda: (OK, 11000)))


def test_without_the_package_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None if name == "cuda" else ModuleType(name))
    cuda.open_driver.cache_clear()
    with pytest.raises(BackendError) as error:
        open_driver()
    assert error.value.hint == "pip install 'wcache[cuda]'"
