# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver behind the interface of `gpu.py`. The only file that touches cuda-bindings.

Runs in loaders, engines and the checker child. The binding is imported by `open_driver`, so that importing this file
costs nothing and needs no GPU. Primary contexts are retained until the process ends: they are torch's as well.
Surprising: cuda-bindings 13 calls the second version of cuDeviceGetUuid plainly `cuDeviceGetUuid`; it gives a MIG
instance its own UUID but not the word MIG, which stands in the device's name.
"""

from __future__ import annotations

import ctypes
import functools
import os
import uuid
from collections.abc import Sequence
from typing import Any

from wcache.errors import BackendError
from wcache.host.fds import OwnedFd
from wcache.host.gpu import GpuInfo, Handle, failure

OLDEST_DRIVER = 11020  # CUDA 11.2; cuDriverGetVersion counts 1000 * major + 10 * minor
NO_LIBRARY_HINT = "is the NVIDIA driver installed, and libcuda.so.1 on the library path (in a container: passed in)?"
_EVENT_DISABLE_TIMING = 0x2
_STREAM_NON_BLOCKING = 0x1


@functools.cache
def open_driver() -> CudaDriver:
    """The driver of this process. Raises BackendError with a hint where there is none."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise BackendError(f"the cuda backend needs cuda-bindings: {e}", hint="pip install 'wcache[cuda]'") from e
    return CudaDriver(driver)


class CudaDriver:
    def __init__(self, api: Any) -> None:
        self._api = api
        self._gpus: dict[int, CudaGpu] = {}
        try:
            _check(api.cuInit(0), "initialise", "CUDA")
            version = _check(api.cuDriverGetVersion(), "ask the version of", "the driver")
        except RuntimeError as e:  # cuda-bindings looks for libcuda.so.1 at the first call
            raise BackendError(f"load the CUDA driver: {e}", hint=NO_LIBRARY_HINT) from e
        if version < OLDEST_DRIVER:
            raise BackendError(
                f"the driver speaks CUDA {version // 1000}.{version % 1000 // 10}, wcache needs at least"
                f" {OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10}",
                hint="update the NVIDIA driver",
            )

    def devices(self) -> tuple[GpuInfo, ...]:
        count = _check(self._api.cuDeviceGetCount(), "count", "devices")
        return tuple(self._info(i) for i in range(count))

    def open(self, index: int) -> CudaGpu:
        if index not in self._gpus:
            self._gpus.setdefault(index, CudaGpu(self._api, self._info(index)))
        return self._gpus[index]

    def _info(self, index: int) -> GpuInfo:
        what = f"device {index}"
        device = _check(self._api.cuDeviceGet(index), "open", what)
        get_uuid = getattr(self._api, "cuDeviceGetUuid_v2", self._api.cuDeviceGetUuid)
        number = uuid.UUID(bytes=bytes(_check(get_uuid(device), "ask the UUID of", what).bytes))
        raw = _check(self._api.cuDeviceGetName(256, device), "ask the name of", what)
        name = bytes(raw).split(b"\0")[0].decode(errors="replace")
        kind = self._api.CUdevice_attribute

        def attribute(which: str) -> int:
            value = getattr(kind, f"CU_DEVICE_ATTRIBUTE_{which}")
            return int(_check(self._api.cuDeviceGetAttribute(value, device), f"ask {which} of", what))

        return GpuInfo(
            index=index,
            uuid=f"{'MIG' if ' MIG ' in name else 'GPU'}-{number}",
            name=name,
            capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            processors=attribute("MULTIPROCESSOR_COUNT"),
            can_map=bool(attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
            can_share=bool(attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
            integrated=bool(attribute("INTEGRATED")),
        )


class CudaGpu:
    """One device; `wcache.host.gpu.Gpu` says what each method does."""

    def __init__(self, api: Any, info: GpuInfo) -> None:
        self._api = api
        self.info = info
        device = _check(api.cuDeviceGet(info.index), "open", f"GPU {info.uuid}")
        self._context = _check(api.cuDevicePrimaryCtxRetain(device), "make a context on", f"GPU {info.uuid}")
        self._fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = self._make_properties()
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = self._call(
            "ask the granularity of", info.uuid, api.cuMemGetAllocationGranularity, self._properties, minimum
        )
        self.granularity = int(size)

    def free_and_total(self) -> tuple[int, int]:
        free, total = self._call("ask the memory of", f"GPU {self.info.uuid}", self._api.cuMemGetInfo)
        return int(free), int(total)

    def synchronize(self, what: str) -> None:
        self._call("wait for", what, self._api.cuCtxSynchronize)

    def create(self, size: int, what: str) -> Handle:
        return self._call("create", what, self._api.cuMemCreate, size, self._properties, 0)

    def release(self, handle: Handle, what: str) -> None:
        self._call("release", what, self._api.cuMemRelease, handle)

    def export(self, handle: Handle, what: str) -> OwnedFd:
        fd = OwnedFd(int(self._call("export", what, self._api.cuMemExportToShareableHandle, handle, self._fd_type, 0)))
        os.set_inheritable(fd.fileno(), False)
        return fd

    def take_in(self, fd: OwnedFd, what: str) -> Handle:
        return self._call("import", what, self._api.cuMemImportFromShareableHandle, fd.fileno(), self._fd_type)

    def location(self, handle: Handle, what: str) -> int:
        found = self._call("ask the device of", what, self._api.cuMemGetAllocationPropertiesFromHandle, handle)
        return int(found.location.id)

    def reserve(self, size: int, what: str) -> int:
        return int(self._call("reserve addresses for", what, self._api.cuMemAddressReserve, size, 0, 0, 0))

    def unreserve(self, address: int, size: int, what: str) -> None:
        self._call("free the addresses of", what, self._api.cuMemAddressFree, address, size)

    def map(self, address: int, size: int, handle: Handle, what: str) -> None:
        self._call("map", what, self._api.cuMemMap, address, size, 0, handle, 0)

    def unmap(self, address: int, size: int, what: str) -> None:
        self._call("unmap", what, self._api.cuMemUnmap, address, size)

    def allow(self, address: int, size: int, *, write: bool, what: str) -> None:
        api = self._api
        access = api.CUmemAccessDesc()
        access.location = self._properties.location
        flags = api.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if write else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("set the access of", what, api.cuMemSetAccess, address, size, [access], 1)

    def copy_in(self, target: int, source: int, size: int, stream: Handle, what: str) -> None:
        self._call("copy to", what, self._api.cuMemcpyHtoDAsync, target, source, size, stream)

    def copy_in_rows(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Handle, what: str
    ) -> None:
        copy = self._api.CUDA_MEMCPY2D()
        copy.srcMemoryType = self._api.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.srcHost, copy.srcPitch = source, source_pitch
        copy.dstMemoryType = self._api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.dstPitch = self._api.CUdeviceptr(target), pitch
        copy.WidthInBytes, copy.Height = width, rows
        self._call("copy rows to", what, self._api.cuMemcpy2DAsync, copy, stream)

    def copy_out(self, target: int, source: int, size: int, stream: Handle, what: str) -> None:
        self._call("copy from", what, self._api.cuMemcpyDtoHAsync, target, source, size, stream)

    def fill(self, address: int, byte: int, size: int, stream: Handle, what: str) -> None:
        self._call("fill", what, self._api.cuMemsetD8Async, address, byte, size, stream)

    def pin(self, size: int, what: str) -> int:
        return int(self._call("pin host memory for", what, self._api.cuMemHostAlloc, size, 0))

    def unpin(self, address: int, what: str) -> None:
        self._call("free the host memory of", what, self._api.cuMemFreeHost, address)

    def scratch(self, size: int, what: str) -> int:
        return int(self._call("allocate scratch for", what, self._api.cuMemAlloc, size))

    def free_scratch(self, address: int, what: str) -> None:
        self._call("free the scratch of", what, self._api.cuMemFree, address)

    def stream(self, what: str) -> Handle:
        return self._call("make a stream for", what, self._api.cuStreamCreate, _STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: Handle, what: str) -> None:
        self._call("destroy the stream of", what, self._api.cuStreamDestroy, stream)

    def wait_stream(self, stream: Handle, what: str) -> None:
        self._call("wait for", what, self._api.cuStreamSynchronize, stream)

    def event(self, what: str) -> Handle:
        return self._call("make an event for", what, self._api.cuEventCreate, _EVENT_DISABLE_TIMING)

    def destroy_event(self, event: Handle, what: str) -> None:
        self._call("destroy the event of", what, self._api.cuEventDestroy, event)

    def record(self, event: Handle, stream: Handle, what: str) -> None:
        self._call("record the event of", what, self._api.cuEventRecord, event, stream)

    def wait_event(self, event: Handle, what: str) -> None:
        self._call("wait for", what, self._api.cuEventSynchronize, event)

    def kernel(self, image: bytes, name: str, what: str) -> Handle:
        module = self._call("load", what, self._api.cuModuleLoadData, image + b"\0")
        return self._call("find", f"{name} in {what}", self._api.cuModuleGetFunction, module, name.encode())

    def launch(
        self, kernel: Handle, grid: int, block: int, arguments: Sequence[int], stream: Handle, what: str
    ) -> None:
        values = (tuple(arguments), (ctypes.c_uint64,) * len(arguments))
        self._call("launch", what, self._api.cuLaunchKernel, kernel, grid, 1, 1, block, 1, 1, 0, stream, values, 0)

    def _call(self, operation: str, what: str, function: Any, *arguments: Any) -> Any:
        """Call the driver with this device's context on top of the calling thread's stack of contexts."""
        _check(self._api.cuCtxPushCurrent(self._context), "enter the context of", f"GPU {self.info.uuid}")
        try:
            result = function(*arguments)
        finally:
            self._api.cuCtxPopCurrent()  # fails only where the call before it failed as well, and that one is reported
        return _check(result, operation, what)

    def _make_properties(self) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.info.index
        properties.requestedHandleTypes = self._fd_type
        return properties


def _check(result: tuple[Any, ...], operation: str, what: str) -> Any:
    """What a call of the binding returned besides its result code. Raises the error for any other code."""
    code, *values = result
    if int(code) != 0:
        raise failure(code.name, operation, what)
    return values[0] if len(values) == 1 else tuple(values)
