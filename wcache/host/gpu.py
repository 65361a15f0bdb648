# SPDX-License-Identifier: Apache-2.0
"""What wcache asks of a GPU driver: the interface that `cuda.py` implements, and a HIP twin would.

Used by loaders, engines and the checker child, never by a daemon. Sizes, addresses and pitches are bytes and plain
integers; handles, streams, events and functions are the driver's own values, opaque here. Every failure is raised
where it happens and names operation and object: `what` is the object ("segment 3 of rank 1").

    here                    CUDA                                      HIP
    devices                 cuDeviceGetCount, cuDeviceGetUuid_v2      hipGetDeviceCount, hipDeviceGetUuid
    open                    cuDevicePrimaryCtxRetain                  hipDevicePrimaryCtxRetain
    granularity             cuMemGetAllocationGranularity             hipMemGetAllocationGranularity
    free_and_total          cuMemGetInfo                              hipMemGetInfo
    create, release         cuMemCreate, cuMemRelease                 hipMemCreate, hipMemRelease
    export, take_in         cuMem{Ex,Im}port..ShareableHandle         hipMem{Ex,Im}port..ShareableHandle
    location                cuMemGetAllocationPropertiesFromHandle    hipMemGetAllocationPropertiesFromHandle
    reserve, unreserve      cuMemAddressReserve, cuMemAddressFree     hipMemAddressReserve, hipMemAddressFree
    map, unmap, allow       cuMemMap, cuMemUnmap, cuMemSetAccess      hipMemMap, hipMemUnmap, hipMemSetAccess
    copy_in, copy_in_rows   cuMemcpyHtoDAsync, cuMemcpy2DAsync        hipMemcpyHtoDAsync, hipMemcpy2DAsync
    copy_out                cuMemcpyDtoHAsync                         hipMemcpyDtoHAsync
    fill                    cuMemsetD8Async                           hipMemsetD8Async
    pin, unpin              cuMemHostAlloc, cuMemFreeHost             hipHostMalloc, hipHostFree
    stream, event, ...      cuStream*, cuEvent*                       hipStream*, hipEvent*
    kernel, launch          cuModuleLoadData, cuLaunchKernel          hipModuleLoadData, hipModuleLaunchKernel
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from wcache.errors import BackendError, OutOfMemory, SegmentError, WcacheError
from wcache.host.fds import OwnedFd

log = logging.getLogger(__name__)

Handle = Any  # the driver's name for something: an allocation, a stream, an event, a kernel

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_HINTS = {
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU for itself: nvidia-smi -c DEFAULT, or use MPS",
    "CUDA_ERROR_NO_DEVICE": "nvidia-smi -L lists the GPUs; CUDA_VISIBLE_DEVICES hides those it does not name",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kernel module and libcuda differ: reboot, or reload the module",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the CUDA compat libraries from LD_LIBRARY_PATH",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel wrote to read-only or unmapped memory; this process must end",
    "CUDA_ERROR_NOT_PERMITTED": "the device files /dev/nvidia* must be open to this user",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is too old for this wcache",
}
_BACKEND = {"CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU this process sees. `index`: CUDA's ordinal here and now, never NVML's; `uuid`: "GPU-..." or "MIG-..."."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    processors: int
    can_map: bool  # virtual memory management
    can_share: bool  # allocations as POSIX file descriptors
    integrated: bool  # its memory is the host's


class Gpu(Protocol):
    """One GPU, its primary context retained until the process ends. Safe for several threads at once.

    No call changes the calling thread's current context.
    """

    @property
    def info(self) -> GpuInfo: ...

    @property
    def granularity(self) -> int: ...

    def free_and_total(self) -> tuple[int, int]: ...

    def synchronize(self, what: str) -> None: ...

    # physical memory

    def create(self, size: int, what: str) -> Handle: ...

    def release(self, handle: Handle, what: str) -> None: ...

    def export(self, handle: Handle, what: str) -> OwnedFd: ...

    def take_in(self, fd: OwnedFd, what: str) -> Handle:
        """Import; the fd stays the caller's."""

    def location(self, handle: Handle, what: str) -> int:
        """Ordinal of the GPU that the allocation lies on."""

    # addresses

    def reserve(self, size: int, what: str) -> int: ...

    def unreserve(self, address: int, size: int, what: str) -> None: ...

    def map(self, address: int, size: int, handle: Handle, what: str) -> None: ...

    def unmap(self, address: int, size: int, what: str) -> None: ...

    def allow(self, address: int, size: int, *, write: bool, what: str) -> None:
        """Give this GPU access to mapped addresses: read, or read and write."""

    # moving bytes; asynchronous in a stream unless host memory is pageable

    def copy_in(self, target: int, source: int, size: int, stream: Handle, what: str) -> None: ...

    def copy_in_rows(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Handle, what: str
    ) -> None: ...

    def copy_out(self, target: int, source: int, size: int, stream: Handle, what: str) -> None: ...

    def fill(self, address: int, byte: int, size: int, stream: Handle, what: str) -> None: ...

    def pin(self, size: int, what: str) -> int:
        """Page-locked host memory, page-aligned; returns its address."""

    def unpin(self, address: int, what: str) -> None: ...

    def scratch(self, size: int, what: str) -> int:
        """A little device memory of this process's own; returns its address."""

    def free_scratch(self, address: int, what: str) -> None: ...

    # order

    def stream(self, what: str) -> Handle: ...

    def destroy_stream(self, stream: Handle, what: str) -> None: ...

    def wait_stream(self, stream: Handle, what: str) -> None: ...

    def event(self, what: str) -> Handle: ...

    def destroy_event(self, event: Handle, what: str) -> None: ...

    def record(self, event: Handle, stream: Handle, what: str) -> None: ...

    def wait_event(self, event: Handle, what: str) -> None: ...

    # kernels

    def kernel(self, image: bytes, name: str, what: str) -> Handle:
        """Load a module (PTX text, compiled by the driver) and find a kernel in it; stays loaded."""

    def launch(
        self, kernel: Handle, grid: int, block: int, arguments: Sequence[int], stream: Handle, what: str
    ) -> None:
        """Launch over a line of blocks; every argument is 64 bits wide."""


class Driver(Protocol):
    """The driver of this process."""

    def devices(self) -> tuple[GpuInfo, ...]:
        """The GPUs that are visible here (CUDA_VISIBLE_DEVICES), in CUDA's order."""

    def open(self, index: int) -> Gpu: ...


def failure(error: str, operation: str, what: str) -> WcacheError:
    """The exception for a driver's result, by its name ("CUDA_ERROR_...")."""
    message = f"{operation} {what}: {error}"
    hint = _HINTS.get(error)
    if error == _OUT_OF_MEMORY:
        return OutOfMemory(message, hint=hint)
    return BackendError(message, hint=hint) if error in _BACKEND else SegmentError(message, hint=hint)


def quietly(function: Callable[..., Any], *arguments: Any) -> None:
    """Undo something; a failure (a context that an illegal access has broken) stops no further undoing."""
    try:
        function(*arguments)
    except WcacheError as e:
        log.warning("%s", e)


def find(driver: Driver, uuid: str) -> GpuInfo:
    """The visible GPU with this UUID, fit to hold segments. Raises BackendError."""
    seen = driver.devices()
    for info in seen:
        if info.uuid == uuid:
            return _fit(info)
    listed = ", ".join(f"{i.uuid} ({i.name})" for i in seen) or "none"
    raise BackendError(
        f"GPU {uuid} is not visible here; visible: {listed}",
        hint="CUDA_VISIBLE_DEVICES hides GPUs it does not name; a container needs the GPU passed in",
    )


def at(driver: Driver, position: int) -> GpuInfo:
    """The visible GPU at a rank's position on this host, where the configuration names none. Raises BackendError."""
    seen = driver.devices()
    if not 0 <= position < len(seen):
        raise BackendError(
            f"rank number {position} of this host has no GPU: {len(seen)} are visible",
            hint="name one GPU a rank with devices = [...] in wcache.toml, or show more with CUDA_VISIBLE_DEVICES",
        )
    return _fit(seen[position])


def _fit(info: GpuInfo) -> GpuInfo:
    if not info.can_map:
        raise BackendError(
            f"{info.name} ({info.uuid}) has no virtual memory management", hint='use backend = "host" in wcache.toml'
        )
    if not info.can_share:
        raise BackendError(
            f"{info.name} ({info.uuid}) cannot share memory as file descriptors",
            hint="seen on WSL2 and Jetson, and with MIG on old drivers; update the driver, or use the host backend",
        )
    return info
