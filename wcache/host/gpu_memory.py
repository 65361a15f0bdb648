# SPDX-License-Identifier: Apache-2.0
"""Who uses a GPU's memory: every byte that NVML reports, by what takes it. Needs no CUDA context.

Used by `wcache status` and by error messages about memory; pynvml (extra `cuda`) is imported when asked.
Weights that only file descriptors hold belong to no process in nvidia-smi: they are what is in use beyond the sum of
the processes, so `no_process` and the shards' own sizes must agree.
Surprising: NVML's first memory query counts the driver's reserve as used; the second version, as here and in
nvidia-smi, does not. Process ids are the host's: in a container's pid namespace NVML lists none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wcache.errors import BackendError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with a context on the GPU. `used`: bytes, 0 where NVML does not say (MIG, WSL)."""

    pid: int
    name: str
    used: int

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {self.used // MIB} MiB"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What NVML says of one GPU (bytes). `reserved`: kept by the driver, part of `total` but not of `used`."""

    uuid: str
    total: int
    used: int
    reserved: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class GpuAccount:
    """`used` split so that nothing is left over: weights + engines + others + unexplained = used.

    `weights`: resident shards as far as memory in use can hold them. `engines`, `others`: what attached engines and
    other processes have by NVML. `no_process`: in use under no process: weights held by file descriptors, and
    `unexplained`, what even they do not explain (another namespace's processes, another cache). `missing`: bytes of
    shards that cannot be in use at all, more than 0 only after the GPU lost them.
    """

    total: int
    used: int
    reserved: int
    weights: int
    engines: int
    others: int
    no_process: int
    unexplained: int
    missing: int

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


def account(use: GpuUse, weights: int, engine_pids: Collection[int]) -> GpuAccount:
    """Split what is in use. `weights`: bytes of all segments resident on this GPU, each counted once.

    NVML may count a mapped segment under the process that maps it; then the weights are taken out of the engines.
    """
    engines = sum(h.used for h in use.holders if h.pid in engine_pids)
    others = sum(h.used for h in use.holders if h.pid not in engine_pids)
    no_process = max(0, use.used - engines - others)
    inside_engines = min(max(0, weights - no_process), engines)
    present = min(weights, no_process + inside_engines)
    return GpuAccount(
        total=use.total,
        used=use.used,
        reserved=use.reserved,
        weights=present,
        engines=engines - inside_engines,
        others=others,
        no_process=no_process,
        unexplained=no_process - (present - inside_engines),
        missing=weights - present,
    )


def measure(uuid: str) -> GpuUse:
    """Ask NVML about the GPU or MIG instance with this UUID. Raises BackendError with a hint."""
    with _nvml() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return GpuUse(
            uuid=uuid,
            total=int(memory.total),
            used=int(memory.used),
            reserved=int(memory.reserved),
            holders=tuple(Holder(p.pid, _name_of(p.pid), _known(p.usedGpuMemory)) for p in processes),
        )


def holders(uuid: str) -> tuple[Holder, ...]:
    """The processes on a GPU, for a message; none where NVML cannot be asked."""
    try:
        return measure(uuid).holders
    except BackendError:  # the message is about memory; that NVML is not there is another story
        return ()


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError as e:
        raise BackendError(f"GPU memory needs nvidia-ml-py: {e}", hint="pip install 'wcache[cuda]'") from e
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        raise BackendError(f"initialise NVML: {e}", hint="is the NVIDIA driver installed?") from e
    try:
        yield pynvml
    except pynvml.NVMLError as e:
        raise BackendError(f"ask NVML: {e}") from e
    finally:
        pynvml.nvmlShutdown()


def _known(value: int | None) -> int:
    return 0 if value is None else int(value)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # gone, or of another namespace
        return "?"
