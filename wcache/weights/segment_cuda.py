# SPDX-License-Identifier: Apache-2.0
"""The `cuda` backend: segments are allocations of CUDA's virtual memory management, shared as file descriptors.

Runs in loaders, engines and the checker child; no torch here. The fd alone keeps the bytes: handle and mapping of
whoever made it may go, and memory stays in use, under no process, until the last fd and mapping are gone.
A mapping is one contiguous range of addresses, read-only unless asked otherwise: a stray kernel write ends the process
that made it and nobody else. Each segment stays mapped while the `DeviceMemory` over it lives.
Surprising: a fresh allocation may hold what another process left there, so it is zeroed as a whole.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

import psutil

from wcache.errors import DeviceMismatch, OutOfMemory, SegmentError
from wcache.host import gpu as gpus
from wcache.host.cuda import open_driver
from wcache.host.fds import OwnedFd
from wcache.host.gpu import Driver, Gpu, Handle, quietly
from wcache.host.gpu_memory import holders
from wcache.model import BackendName
from wcache.weights.digest_cuda import Digester
from wcache.weights.segment import Access

LEGACY_STREAM = 0  # the one that torch uses as well unless told otherwise


def visible_device(position: int) -> str:
    """UUID of the visible GPU at a rank's position on this host, where the configuration names none.

    Raises BackendError with a hint.
    """
    return gpus.at(open_driver(), position).uuid


class CudaBackend:
    """Segments on the GPU with this UUID. The context is the device's primary one, which torch uses too."""

    name = BackendName.CUDA

    def __init__(self, device: str, driver: Driver | None = None) -> None:
        self._driver = open_driver() if driver is None else driver
        self.gpu: Gpu = self._driver.open(gpus.find(self._driver, device).index)
        self.device = device
        self._lock = threading.Lock()
        self._digester: Digester | None = None

    @property
    def granularity(self) -> int:
        return self.gpu.granularity

    def available(self) -> int:
        free, _ = self.gpu.free_and_total()
        if self.gpu.info.integrated:  # shares the host's memory, where page cache counts as used but can be had
            return max(free, int(psutil.virtual_memory().available))
        return free

    def usage(self) -> str:
        free, total = self.gpu.free_and_total()
        held = ", ".join(str(h) for h in holders(self.device)) or "no process that NVML lists"
        return f"{free} of {total} bytes are free on {self.device}; in use by {held}"

    def create(self, name: str, size: int) -> CudaSegment:
        what = f"segment {name}"
        if self.aligned(size) > self.available():
            raise OutOfMemory(f"create {what}: needs {self.aligned(size)} bytes, {self.usage()}")
        try:
            return CudaSegment(self, what, size)
        except OutOfMemory as e:
            raise OutOfMemory(f"{e}: needs {self.aligned(size)} bytes, {self.usage()}", hint=e.hint) from e

    def map(self, fds: Sequence[OwnedFd], sizes: Sequence[int], access: Access = Access.READ) -> CudaMapping:
        return CudaMapping(self, fds, sizes, access)

    def aligned(self, size: int) -> int:
        return -(-max(size, 1) // self.granularity) * self.granularity

    def digest(self, address: int, size: int, what: str) -> str:
        with self._lock:
            if self._digester is None:
                self._digester = Digester(self.gpu)
                weakref.finalize(self, self._digester.close).atexit = False
            digester = self._digester
        return digester.digest(address, size, what)

    def check_device(self, handle: Handle, what: str) -> None:
        """An allocation of another GPU could be mapped and read over the bus: refuse it, naming both GPUs."""
        index = self.gpu.location(handle, what)
        if index != self.gpu.info.index:
            where = {i.index: i.uuid for i in self._driver.devices()}.get(index, f"device {index}")
            raise DeviceMismatch(f"{what} lies on {where}, asked for on {self.device}")


class DeviceMemory:
    """`size` bytes at `address` on the GPU with CUDA's ordinal `device_index`, mapped for as long as this lives.

    Supports weak references. `address` is aligned to the allocation granularity.
    """

    __slots__ = ("__weakref__", "address", "device_index", "size")

    def __init__(self, address: int, size: int, device_index: int) -> None:
        self.address = address
        self.size = size
        self.device_index = device_index

    def __repr__(self) -> str:
        return f"DeviceMemory({self.address:#x}, {self.size}, device {self.device_index})"


class CudaSegment:
    """An allocation that its one writer fills through a read-write mapping. Its fd is made at once, not at the end."""

    def __init__(self, backend: CudaBackend, what: str, size: int) -> None:
        self.size = size
        self.aligned_size = backend.aligned(size)
        self._backend = backend
        self._what = what
        gpu = backend.gpu
        with ExitStack() as always, ExitStack() as undo:
            handle = gpu.create(self.aligned_size, what)
            always.callback(quietly, gpu.release, handle, what)  # fd and mapping keep the memory
            self._fd = undo.enter_context(gpu.export(handle, what))
            self._range = undo.enter_context(_Range(gpu, self.aligned_size, what))
            self._range.map(0, self.aligned_size, handle, what)
            self._range.allow(write=True)
            gpu.fill(self._range.address, 0, self.aligned_size, LEGACY_STREAM, what)
            gpu.synchronize(what)
            undo.pop_all()
        self._memory: DeviceMemory | None = self._range.lend(0, size)

    def memory(self) -> DeviceMemory:
        if self._memory is None:
            raise SegmentError(f"{self._what} was sealed or closed")
        return self._memory

    def digest(self) -> str:
        return self._backend.digest(self.memory().address, self.size, self._what)

    def seal(self) -> OwnedFd:
        """Tensors that still stand on the memory can go on reading it, and no longer write."""
        memory = self.memory()
        self._backend.gpu.synchronize(self._what)
        self._range.allow(write=False)
        self._memory = None
        del memory
        return OwnedFd(self._fd.take())

    def close(self) -> None:
        self._memory = None
        self._fd.close()


class CudaMapping:
    """Published segments in one contiguous range of addresses, in the order of their fds."""

    def __init__(self, backend: CudaBackend, fds: Sequence[OwnedFd], sizes: Sequence[int], access: Access) -> None:
        self._backend = backend
        self._memories: list[DeviceMemory] = []
        if not fds:
            return
        aligned = [backend.aligned(size) for size in sizes]
        offsets = [sum(aligned[:i]) for i in range(len(aligned))]
        with ExitStack() as undo:
            span = undo.enter_context(_Range(backend.gpu, sum(aligned), f"{len(fds)} segments"))
            for i, (fd, offset, size) in enumerate(zip(fds, offsets, aligned, strict=True)):
                _map_one(backend, span, fd, offset, size, f"segment {i}")
            span.allow(write=access is Access.READ_WRITE)
            undo.pop_all()
        self._memories = [span.lend(offset, size) for offset, size in zip(offsets, sizes, strict=True)]

    def memory(self, index: int) -> DeviceMemory:
        return self._memories[index]

    def digest(self, index: int) -> str:
        memory = self._memories[index]
        return self._backend.digest(memory.address, memory.size, f"segment {index}")

    def close(self) -> None:
        self._memories = []


def _map_one(backend: CudaBackend, span: _Range, fd: OwnedFd, offset: int, size: int, what: str) -> None:
    handle = backend.gpu.take_in(fd, what)
    try:
        backend.check_device(handle, what)
        span.map(offset, size, handle, what)
    finally:
        quietly(backend.gpu.release, handle, what)  # the mapping keeps the memory


class _Range:
    """A reserved range of addresses with allocations mapped into parts of it.

    As a context manager it undoes everything; once parts are lent, each goes with its DeviceMemory and the addresses
    with the last one. The garbage collector may call `_drop` in any thread at any time, so there is no lock in it:
    a part is unmapped before it is forgotten, and whoever takes the only ticket frees the addresses.
    """

    def __init__(self, gpu: Gpu, size: int, what: str) -> None:
        self._gpu = gpu
        self._what = what
        self._size = size
        self._pid = os.getpid()
        self._parts: dict[int, int] = {}  # offset to size
        self.address = gpu.reserve(size, what)
        self._ticket = [self.address]

    def map(self, offset: int, size: int, handle: Handle, what: str) -> None:
        self._gpu.map(self.address + offset, size, handle, what)
        self._parts[offset] = size

    def allow(self, *, write: bool) -> None:
        self._gpu.allow(self.address, self._size, write=write, what=self._what)

    def lend(self, offset: int, size: int) -> DeviceMemory:
        """The part at `offset`, `size` bytes of it in use; it stays mapped for as long as what is returned lives."""
        memory = DeviceMemory(self.address + offset, size, self._gpu.info.index)
        finalizer = weakref.finalize(memory, self._drop, offset)
        finalizer.atexit = False  # the end of the process unmaps; torch may have torn its context down by then
        return memory

    def _drop(self, offset: int) -> None:
        if os.getpid() != self._pid:  # a forked child has no CUDA
            return
        quietly(self._gpu.synchronize, self._what)  # work in flight may still read there
        quietly(self._gpu.unmap, self.address + offset, self._parts[offset], self._what)
        del self._parts[offset]
        if not self._parts:
            self._unreserve()

    def _unreserve(self) -> None:
        try:
            address = self._ticket.pop()
        except IndexError:  # another thread dropped the last part at the same moment
            return
        quietly(self._gpu.unreserve, address, self._size, self._what)

    def __enter__(self) -> _Range:
        return self

    def __exit__(self, *_: object) -> None:
        for offset, size in self._parts.items():
            quietly(self._gpu.unmap, self.address + offset, size, self._what)
        self._parts.clear()
        self._unreserve()
