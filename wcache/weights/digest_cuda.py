# SPDX-License-Identifier: Apache-2.0
"""The digest of GPU segments, computed where the bytes are: `wcd1:` and 32 hex digits.

Runs in loaders, publishing engines and the checker child. `kernels/digest.cu` has the maths and is where to read first;
this file launches it and finishes its two 64-bit lanes with the number of bytes. The kernel is PTX, compiled by the
driver when it is first loaded, so one file serves every GPU since Turing.
It is an integrity check, not a cryptographic hash: it finds damage, not an adversary.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from importlib.resources import files

from wcache.host.gpu import Gpu, Handle, quietly

ALGORITHM = "wcd1"
PHI, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the constants of digest.cu
MASK = (1 << 64) - 1
THREADS = 256  # a block, as digest.cu is bounded to
BLOCKS_PER_PROCESSOR = 8
BYTES_PER_BLOCK = THREADS * 16 * 4  # what a block reads in one turn of its loop
LANES_BYTES = 16

_WHAT = "digests"


@functools.cache
def image() -> bytes:
    """PTX text. Kept, because a process that changes its user may not be able to read it later."""
    return files("wcache.weights").joinpath("kernels", "digest.ptx").read_bytes()


class Digester:
    """The kernel on one GPU, with a stream and two lanes of device memory that all digests there use in turn.

    Made once, because making them for each segment takes as long as a third of a segment's digest.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._kernel: Handle = gpu.kernel(image(), ALGORITHM, "digest.ptx")
        self._stream: Handle = gpu.stream(_WHAT)
        try:
            self._lanes = gpu.scratch(LANES_BYTES, _WHAT)
        except BaseException:
            gpu.destroy_stream(self._stream, _WHAT)
            raise

    def digest(self, address: int, size: int, what: str) -> str:
        """Digest of `size` bytes at a 16-byte aligned address, after all that this process has under way on the GPU."""
        gpu, stream, task = self._gpu, self._stream, f"the digest of {what}"
        result = (ctypes.c_uint64 * 2)()
        with self._lock:
            gpu.synchronize(what)
            gpu.fill(self._lanes, 0, LANES_BYTES, stream, task)
            if size:
                grid = min(-(-size // BYTES_PER_BLOCK), gpu.info.processors * BLOCKS_PER_PROCESSOR)
                gpu.launch(self._kernel, grid, THREADS, (address, size, self._lanes), stream, task)
            gpu.copy_out(ctypes.addressof(result), self._lanes, LANES_BYTES, stream, task)
            gpu.wait_stream(stream, task)
        return finish(result[0], result[1], size)

    def close(self) -> None:
        quietly(self._gpu.free_scratch, self._lanes, _WHAT)
        quietly(self._gpu.destroy_stream, self._stream, _WHAT)


def finish(total: int, xored: int, size: int) -> str:
    """The digest's text: each lane mixed with the number of bytes (the finaliser of splitmix64)."""
    first = _mix((total + size * PHI) & MASK)
    second = _mix(((xored ^ first) + size) & MASK)
    return f"{ALGORITHM}:{first:016x}{second:016x}"


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * M1) & MASK
    x = ((x ^ (x >> 27)) * M2) & MASK
    return x ^ (x >> 31)
