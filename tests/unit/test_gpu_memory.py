# SPDX-License-Identifier: Apache-2.0
"""Every byte in use on a GPU is somebody's: the account adds up whatever NVML lists."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import BackendError
from wcache.host.gpu_memory import MIB, GpuUse, Holder, account, holders, measure

GIB = 1 << 30


def use(used: int, *held: Holder) -> GpuUse:
    return GpuUse("GPU-x", total=140 * GIB, used=used, reserved=GIB, holders=held)


def test_weights_held_by_fds_alone_are_no_process_and_explained() -> None:
    split = account(use(120 * GIB), 120 * GIB, ())
    assert (split.weights, split.no_process, split.unexplained, split.missing) == (120 * GIB, 120 * GIB, 0, 0)


def test_engines_and_others_are_told_apart() -> None:
    engine, trainer = Holder(10, "vllm", 8 * GIB), Holder(11, "train", 2 * GIB)
    split = account(use(30 * GIB, engine, trainer), 20 * GIB, {10})
    assert (split.engines, split.others, split.weights, split.unexplained) == (8 * GIB, 2 * GIB, 20 * GIB, 0)


def test_weights_that_nvml_counts_under_an_engine_are_taken_out_of_it() -> None:
    split = account(use(28 * GIB, Holder(10, "vllm", 28 * GIB)), 20 * GIB, {10})
    assert (split.engines, split.weights, split.no_process) == (8 * GIB, 20 * GIB, 0)


def test_weights_that_cannot_be_in_use_are_missing() -> None:
    assert account(use(0), 5 * GIB, ()).missing == 5 * GIB


@given(
    st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**6)), max_size=5),
    st.integers(0, 10**6), st.sets(st.integers(0, 9)),
)  # fmt: skip
def test_the_parts_sum_to_what_is_used(
    beyond: int, held: list[tuple[int, int]], weights: int, engine_pids: set[int]
) -> None:
    processes = [Holder(pid, "p", size) for pid, size in held]
    split = account(use(beyond + sum(h.used for h in processes), *processes), weights, engine_pids)
    assert split.weights + split.engines + split.others + split.unexplained == split.used
    assert split.weights + split.missing == weights
    assert min(split.as_dict().values()) >= 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A pynvml with one GPU, which counts how often it was opened and shut."""
    module = ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlMemory_v2=2,
        opened=0,
        nvmlInit=lambda: module.__dict__.update(opened=module.opened + 1),
        nvmlShutdown=lambda: module.__dict__.update(opened=module.opened - 1),
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda _, version: SimpleNamespace(total=100, used=10 * version, reserved=3),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * MIB),
            SimpleNamespace(pid=2**22 + 5, usedGpuMemory=None),
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_gpu_is_measured_by_uuid_with_the_names_of_its_processes(nvml: ModuleType) -> None:
    found = measure("MIG-1")
    assert (found.uuid, found.used, found.reserved) == ("MIG-1", 20, 3)
    mine, gone = found.holders
    assert mine.pid == os.getpid() and mine.used == 5 * MIB and mine.name != "?"
    assert (gone.name, gone.used) == ("?", 0)
    assert nvml.opened == 0


def test_an_nvml_error_is_ours_and_a_message_does_without(nvml: ModuleType) -> None:
    def unknown(uuid: str) -> str:
        raise nvml.NVMLError(f"Not Found: {uuid}")

    nvml.__dict__["nvmlDeviceGetHandleByUUID"] = unknown
    with pytest.raises(BackendError, match="Not Found: GPU-y"):
        measure("GPU-y")
    assert holders("GPU-y") == () and nvml.opened == 0


def test_without_the_package_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(BackendError) as error:
        measure("GPU-x")
    assert "wcache[cuda]" in error.value.hint
