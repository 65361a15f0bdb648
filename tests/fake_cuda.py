# SPDX-License-Identifier: Apache-2.0
"""A GPU driver without a GPU: allocations are memfds, exports are real descriptors, addresses are real addresses.

Work in streams runs late, when somebody waits for it, so that memory which is reused or freed too early shows. What
lies on which device is written in the memfd's name and survives being passed to another process. `fail` makes the
n-th call of an operation fail as the driver would; `live()` is what has not been given back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wcd1

from wcache.host.fds import OwnedFd
from wcache.host.gpu import GpuInfo, failure

GRANULARITY = 64 << 10
CAPACITY = 256 << 20
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


def gpu_info(index: int, number: int | None = None, **more: Any) -> GpuInfo:
    """The device with ordinal `index`; `number` names the chip, whatever ordinal it has."""
    values: dict[str, Any] = {
        "index": index, "uuid": uuid(index if number is None else number), "name": "Fake GPU", "capability": (9, 0),
        "processors": 4, "can_map": True, "can_share": True, "integrated": False,
    }  # fmt: skip
    return GpuInfo(**{**values, **more})


@dataclass
class _Allocation:
    fd: OwnedFd
    device: str
    size: int


@dataclass
class _Range:
    size: int
    parts: dict[int, tuple[int, str, int]] = field(default_factory=dict)  # offset: (size, device, inode)
    protection: int = PROT_NONE


@dataclass
class _Stream:
    pending: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0


@dataclass
class _Event:
    stream: _Stream | None = None
    mark: int = 0


class FakeDriver:
    """Several devices; `order` are the chips' numbers in the order in which CUDA_VISIBLE_DEVICES shows them."""

    def __init__(self, *infos: GpuInfo) -> None:
        self.infos = infos or (gpu_info(0), gpu_info(1))
        self.gpus: dict[int, FakeGpu] = {}
        self.calls: Counter[str] = Counter()
        self.lock = threading.RLock()
        self._failures: dict[str, tuple[int, str]] = {}

    def devices(self) -> tuple[GpuInfo, ...]:
        return self.infos

    def open(self, index: int) -> FakeGpu:
        return self.gpus.setdefault(index, FakeGpu(self, self.infos[index]))

    def fail(self, operation: str, error: str = "CUDA_ERROR_UNKNOWN", *, after: int = 0) -> None:
        """The call of `operation` that comes after `after` more fails, and every later one."""
        self._failures[operation] = (self.calls[operation] + after, error)

    def heal(self) -> None:
        self._failures.clear()

    def step(self, operation: str, what: str) -> None:
        with self.lock:
            self.calls[operation] += 1
            first, error = self._failures.get(operation, (-1, ""))
            if 0 <= first < self.calls[operation]:
                raise failure(error, operation, what)

    def live(self, *, digesters: int = 0) -> dict[str, int]:
        """What was made and not given back, over all devices. `digesters`: backends that still live and have one."""
        total: Counter[str] = Counter()
        for gpu in self.gpus.values():
            total.update(gpu.live())
        total.subtract({"streams": digesters, "scratch": digesters})
        return {kind: count for kind, count in total.items() if count}


class FakeGpu:
    """One device; `wcache.host.gpu.Gpu` says what each method does."""

    granularity = GRANULARITY

    def __init__(self, driver: FakeDriver, info: GpuInfo) -> None:
        self.info = info
        self.capacity = CAPACITY
        self._driver = driver
        self._step = driver.step
        self._handles: dict[int, _Allocation] = {}
        self._ranges: dict[int, _Range] = {}
        self._pinned: dict[int, mmap.mmap] = {}
        self._scratch: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._legacy = _Stream()
        self._streams: list[_Stream] = []
        self._events: list[_Event] = []
        self._next = 0

    def live(self) -> dict[str, int]:
        return {
            "handles": len(self._handles), "ranges": len(self._ranges), "pinned": len(self._pinned),
            "scratch": len(self._scratch), "streams": len(self._streams), "events": len(self._events),
        }  # fmt: skip

    def free_and_total(self) -> tuple[int, int]:
        self._step("free_and_total", self.info.uuid)
        inodes = {os.fstat(a.fd.fileno()).st_ino: a.size for a in self._handles.values()}
        for span in list(self._ranges.values()):
            inodes.update({inode: size for size, _, inode in span.parts.values()})
        return self.capacity - sum(inodes.values()), self.capacity

    def synchronize(self, what: str) -> None:
        self._step("synchronize", what)
        for stream in [self._legacy, *self._streams]:
            self._run(stream, len(stream.pending))

    # physical memory

    def create(self, size: int, what: str) -> int:
        self._step("create", what)
        if size % GRANULARITY or size <= 0:
            raise failure("CUDA_ERROR_INVALID_VALUE", "create", what)
        if size > self.free_and_total()[0]:
            raise failure("CUDA_ERROR_OUT_OF_MEMORY", "create", what)
        fd = OwnedFd(os.memfd_create(f"fake:{self.info.uuid}", os.MFD_CLOEXEC))
        os.ftruncate(fd.fileno(), size)
        os.pwrite(fd.fileno(), b"left by another process", size - 64)  # the driver does not promise zeros
        return self._keep(_Allocation(fd, self.info.uuid, size))

    def release(self, handle: int, what: str) -> None:
        self._handles.pop(handle).fd.close()
        self._step("release", what)

    def export(self, handle: int, what: str) -> OwnedFd:
        self._step("export", what)
        return self._handles[handle].fd.duplicate()

    def take_in(self, fd: OwnedFd, what: str) -> int:
        self._step("take_in", what)
        target = str(Path(f"/proc/self/fd/{fd.fileno()}").readlink())
        if not target.startswith("/memfd:fake:"):
            raise failure("CUDA_ERROR_INVALID_VALUE", "import", what)
        device = target.removeprefix("/memfd:fake:").split(" ")[0]
        if device not in {i.uuid for i in self._driver.devices()}:
            raise failure("CUDA_ERROR_INVALID_DEVICE", "import", what)
        return self._keep(_Allocation(fd.duplicate(), device, os.fstat(fd.fileno()).st_size))

    def location(self, handle: int, what: str) -> int:
        self._step("location", what)
        return next(i.index for i in self._driver.devices() if i.uuid == self._handles[handle].device)

    def _keep(self, allocation: _Allocation) -> int:
        with self._driver.lock:
            self._next += 1
            self._handles[self._next] = allocation
            return self._next

    # addresses

    def reserve(self, size: int, what: str) -> int:
        self._step("reserve", what)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        address = int(_libc.mmap(None, size, PROT_NONE, flags, -1, 0))
        self._ranges[address] = _Range(size)
        return address

    def unreserve(self, address: int, size: int, what: str) -> None:
        self._step("unreserve", what)
        span = self._ranges[address]
        if span.parts or span.size != size:
            raise failure("CUDA_ERROR_INVALID_VALUE", "free the addresses of", what)
        del self._ranges[address]
        _libc.munmap(address, size)

    def map(self, address: int, size: int, handle: int, what: str) -> None:
        self._step("map", what)
        allocation = self._handles[handle]
        base, span = self._span(address, what)
        if size != allocation.size or address - base + size > span.size or address - base in span.parts:
            raise failure("CUDA_ERROR_INVALID_VALUE", "map", what)
        fd = allocation.fd.fileno()
        _libc.mmap(address, size, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
        span.parts[address - base] = (size, allocation.device, os.fstat(fd).st_ino)

    def unmap(self, address: int, size: int, what: str) -> None:
        self._step("unmap", what)
        base, span = self._span(address, what)
        if span.parts.pop(address - base, (0,))[0] != size:
            raise failure("CUDA_ERROR_INVALID_VALUE", "unmap", what)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        _libc.mmap(address, size, PROT_NONE, flags, -1, 0)

    def allow(self, address: int, size: int, *, write: bool, what: str) -> None:
        self._step("allow", what)
        _, span = self._span(address, what)
        if sum(part[0] for part in span.parts.values()) != size:
            raise failure("CUDA_ERROR_INVALID_VALUE", "set the access of", what)
        span.protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        _libc.mprotect(address, size, span.protection)

    def _span(self, address: int, what: str) -> tuple[int, _Range]:
        for base, span in self._ranges.items():
            if base <= address < base + span.size:
                return base, span
        raise failure("CUDA_ERROR_INVALID_VALUE", "find", what)

    # moving bytes

    def copy_in(self, target: int, source: int, size: int, stream: Any, what: str) -> None:
        self._step("copy_in", what)
        self._enqueue(stream, self._writer(target, source, size, what))

    def copy_in_rows(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Any, what: str
    ) -> None:
        self._step("copy_in_rows", what)
        if pitch < width or source_pitch < width:
            raise failure("CUDA_ERROR_INVALID_VALUE", "copy rows to", what)
        for row in range(rows):
            copy = self._writer(target + row * pitch, source + row * source_pitch, width, what)
            self._enqueue(stream, copy)

    def _writer(self, target: int, source: int, size: int, what: str) -> Callable[[], None]:
        """Page-locked memory is read when the copy runs, other host memory at once."""
        self._writable(target, what)
        if any(base <= source < base + len(room) for base, room in self._pinned.items()):
            return lambda: ctypes.memmove(target, source, size)
        data = ctypes.string_at(source, size)
        return lambda: ctypes.memmove(target, data, size)

    def copy_out(self, target: int, source: int, size: int, stream: Any, what: str) -> None:
        self._step("copy_out", what)
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size))

    def fill(self, address: int, byte: int, size: int, stream: Any, what: str) -> None:
        self._step("fill", what)
        self._writable(address, what)
        self._enqueue(stream, lambda: ctypes.memset(address, byte, size))

    def _writable(self, address: int, what: str) -> None:
        if address not in self._scratch and not self._span(address, what)[1].protection & mmap.PROT_WRITE:
            raise failure("CUDA_ERROR_INVALID_VALUE", "write to", what)

    def pin(self, size: int, what: str) -> int:
        self._step("pin", what)
        room = mmap.mmap(-1, size)
        anchor = ctypes.c_char.from_buffer(room)
        address = ctypes.addressof(anchor)
        del anchor
        self._pinned[address] = room
        return address

    def unpin(self, address: int, what: str) -> None:
        self._step("unpin", what)
        self._pinned.pop(address).close()

    def scratch(self, size: int, what: str) -> int:
        self._step("scratch", what)
        room = ctypes.create_string_buffer(size)
        self._scratch[ctypes.addressof(room)] = room
        return ctypes.addressof(room)

    def free_scratch(self, address: int, what: str) -> None:
        self._step("free_scratch", what)
        del self._scratch[address]

    # order

    def stream(self, what: str) -> _Stream:
        self._step("stream", what)
        self._streams.append(_Stream())
        return self._streams[-1]

    def destroy_stream(self, stream: _Stream, what: str) -> None:
        self._step("destroy_stream", what)
        self._streams = [s for s in self._streams if s is not stream]

    def wait_stream(self, stream: _Stream, what: str) -> None:
        self._step("wait_stream", what)
        self._run(stream, len(stream.pending))

    def event(self, what: str) -> _Event:
        self._step("event", what)
        self._events.append(_Event())
        return self._events[-1]

    def destroy_event(self, event: _Event, what: str) -> None:
        self._step("destroy_event", what)
        self._events = [e for e in self._events if e is not event]

    def record(self, event: _Event, stream: _Stream, what: str) -> None:
        self._step("record", what)
        with self._driver.lock:
            event.stream, event.mark = stream, len(stream.pending)

    def wait_event(self, event: _Event, what: str) -> None:
        self._step("wait_event", what)
        if event.stream is not None:
            self._run(event.stream, event.mark)

    def _enqueue(self, stream: Any, work: Callable[[], Any]) -> None:
        with self._driver.lock:
            (stream or self._legacy).pending.append(work)

    def _run(self, stream: _Stream, until: int) -> None:
        with self._driver.lock:
            while stream.done < until:
                stream.pending[stream.done]()
                stream.pending[stream.done] = _nothing
                stream.done += 1

    # kernels

    def kernel(self, image: bytes, name: str, what: str) -> str:
        self._step("kernel", what)
        if f".entry {name}(".encode() not in image:
            raise failure("CUDA_ERROR_NOT_FOUND", f"find {name} in", what)
        return name

    def launch(self, kernel: str, grid: int, block: int, arguments: Sequence[int], stream: _Stream, what: str) -> None:
        self._step("launch", what)
        address, size, lanes = arguments

        def work() -> None:
            total, xored = wcd1.words(ctypes.string_at(address, size))
            room = (ctypes.c_uint64 * 2).from_address(lanes)
            room[0] = (room[0] + total) & wcd1.MASK
            room[1] ^= xored

        self._enqueue(stream, work)


def _nothing() -> None:
    """What is left of work that was done."""


def read(memory: Any, offset: int = 0, size: int | None = None) -> bytes:
    """Bytes of a fake DeviceMemory."""
    return ctypes.string_at(memory.address + offset, memory.size - offset if size is None else size)


def write(memory: Any, data: bytes, offset: int = 0) -> None:
    """What a kernel of the writer would do."""
    ctypes.memmove(memory.address + offset, data, len(data))
