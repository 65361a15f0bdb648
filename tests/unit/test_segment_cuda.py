# SPDX-License-Identifier: Apache-2.0
"""The cuda backend over a driver that needs no GPU: what it maps where, what it refuses, what failures leave."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import wcd1
from fake_cuda import CAPACITY, GRANULARITY, FakeDriver, gpu_info, read, uuid, write

from wcache.errors import BackendError, DeviceMismatch, OutOfMemory, SegmentError, WcacheError
from wcache.host import gpu as gpus
from wcache.host.fds import OwnedFd, close_all, memfd
from wcache.weights.segment import Access
from wcache.weights.segment_cuda import CudaBackend, CudaMapping

SIZES = (3 * GRANULARITY - 5, 1, GRANULARITY)
STEPS_OF_A_SEGMENT = ("create", "export", "reserve", "map", "allow", "fill", "synchronize")
STEPS_OF_A_MAPPING = ("reserve", "take_in", "location", "map", "allow")


def publish(backend: CudaBackend, *contents: bytes) -> list[OwnedFd]:
    """Sealed segments with these contents."""
    fds = []
    for i, content in enumerate(contents):
        segment = backend.create(f"segment-{i}", len(content))
        write(segment.memory(), content)
        fds.append(segment.seal())
    return fds


def settled(driver: FakeDriver) -> dict[str, int]:
    gc.collect()
    return driver.live()


def test_sealed_segments_are_mapped_in_one_range_with_the_same_bytes_and_nothing_is_left(
    driver: FakeDriver, backend: CudaBackend
) -> None:
    contents = [os.urandom(size) for size in SIZES]
    fds = publish(backend, *contents)
    mapping = backend.map(fds, SIZES)
    close_all(fds)
    assert [read(mapping.memory(i)) for i in range(3)] == contents
    starts = [mapping.memory(i).address for i in range(3)]
    assert [b - a for a, b in itertools.pairwise(starts)] == [3 * GRANULARITY, GRANULARITY]
    assert driver.live() == {"ranges": 1}
    mapping.close()
    assert settled(driver) == {}


def test_sizes_are_granted_in_units_of_the_granularity_and_the_padding_is_zero(backend: CudaBackend) -> None:
    segment = backend.create("s", GRANULARITY + 1)
    assert (segment.size, segment.aligned_size, segment.memory().size) == (
        GRANULARITY + 1, 2 * GRANULARITY, GRANULARITY + 1,
    )  # fmt: skip
    padded = segment.memory()
    padded.size = segment.aligned_size
    assert not any(read(padded))
    segment.close()


def test_a_digest_is_the_references_and_the_same_for_writer_and_reader(backend: CudaBackend) -> None:
    content = os.urandom(GRANULARITY + 13)
    segment = backend.create("s", len(content))
    write(segment.memory(), content)
    assert segment.digest() == wcd1.digest(content)
    with segment.seal() as fd:
        mapping = backend.map([fd], [len(content)])
        assert mapping.digest(0) == wcd1.digest(content)
        mapping.close()


def test_engines_map_read_only_unless_they_ask_to_write(driver: FakeDriver, backend: CudaBackend) -> None:
    fds = publish(backend, b"weights")
    gpu = driver.open(0)
    for access, refused in ((Access.READ, True), (Access.READ_WRITE, False)):
        mapping = backend.map(fds, [7], access)
        if refused:
            with pytest.raises(SegmentError, match="CUDA_ERROR_INVALID_VALUE"):
                gpu.fill(mapping.memory(0).address, 0, 7, None, "stray write")
        else:
            gpu.fill(mapping.memory(0).address, 0, 7, None, "wanted write")
            gpu.synchronize("it")
            assert read(mapping.memory(0)) == bytes(7)
        mapping.close()
    close_all(fds)


def test_the_writer_itself_cannot_write_after_sealing(driver: FakeDriver, backend: CudaBackend) -> None:
    segment = backend.create("s", 8)
    kept = segment.memory()
    with segment.seal():
        with pytest.raises(SegmentError):
            driver.open(0).fill(kept.address, 1, 8, None, "s")
        with pytest.raises(SegmentError, match="sealed"):
            segment.memory()


def test_a_segment_stays_mapped_while_its_memory_lives_and_goes_alone(driver: FakeDriver, backend: CudaBackend) -> None:
    contents = [os.urandom(GRANULARITY) for _ in range(3)]
    fds = publish(backend, *contents)
    mapping = backend.map(fds, [GRANULARITY] * 3)
    close_all(fds)
    kept = mapping.memory(1)
    gone = weakref.ref(mapping.memory(0))
    mapping.close()
    gc.collect()
    assert gone() is None and read(kept) == contents[1]
    free, total = driver.open(0).free_and_total()
    assert total - free == GRANULARITY
    del kept
    assert settled(driver) == {}


def test_the_same_shard_mapped_twice_in_a_process_is_two_mappings(driver: FakeDriver, backend: CudaBackend) -> None:
    fds = publish(backend, b"same")
    first, second = backend.map(fds, [4]), backend.map(fds, [4])
    close_all(fds)
    first.close()
    gc.collect()
    assert read(second.memory(0)) == b"same"
    second.close()
    assert settled(driver) == {}


def test_no_segments_are_mapped_as_nothing(driver: FakeDriver, backend: CudaBackend) -> None:
    backend.map([], []).close()
    assert driver.live() == {}


@pytest.mark.parametrize("step", STEPS_OF_A_SEGMENT)
def test_a_segment_that_fails_at_any_step_leaves_nothing(driver: FakeDriver, backend: CudaBackend, step: str) -> None:
    driver.fail(step)
    with pytest.raises(SegmentError, match="segment s: CUDA_ERROR_UNKNOWN"):
        backend.create("s", 100)
    driver.heal()
    assert settled(driver) == {}
    assert backend.available() == CAPACITY


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("step", STEPS_OF_A_MAPPING)
def test_a_mapping_that_fails_at_any_step_leaves_nothing_and_the_fds_stay_the_callers(
    driver: FakeDriver, backend: CudaBackend, step: str, after: int
) -> None:
    fds = publish(backend, b"one", b"two")
    if after and step in ("reserve", "allow"):
        after = 0  # asked once for all segments
    driver.fail(step, after=after)
    named = f"segment {after}" if step not in ("reserve", "allow") else "2 segments"
    with pytest.raises(SegmentError, match=f"{named}: CUDA_ERROR_UNKNOWN"):
        backend.map(fds, [3, 3])
    driver.heal()
    assert settled(driver) == {}
    mapping = backend.map(fds, [3, 3])
    assert read(mapping.memory(1)) == b"two"
    mapping.close()
    close_all(fds)


def test_an_unmap_that_fails_stops_no_further_unmapping(
    driver: FakeDriver, backend: CudaBackend, caplog: pytest.LogCaptureFixture
) -> None:
    fds = publish(backend, b"one", b"two")
    mapping = backend.map(fds, [3, 3])
    close_all(fds)
    driver.fail("synchronize", "CUDA_ERROR_ILLEGAL_ADDRESS")
    mapping.close()
    assert settled(driver) == {}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text


def test_memory_of_another_gpu_is_refused_naming_both(driver: FakeDriver, backend: CudaBackend) -> None:
    fds = publish(backend, b"on GPU 0")
    other = CudaBackend(uuid(1), driver)
    with pytest.raises(DeviceMismatch) as error:
        other.map(fds, [8])
    assert uuid(0) in str(error.value) and uuid(1) in str(error.value)
    assert settled(driver) == {}
    close_all(fds)


def test_devices_are_found_by_uuid_in_whatever_order_they_are_shown(backend: CudaBackend) -> None:
    fds = publish(backend, b"on chip 0")
    reordered = FakeDriver(gpu_info(0, number=1), gpu_info(1, number=0))
    engine = CudaBackend(uuid(0), reordered)
    mapping = engine.map(fds, [9])
    assert mapping.memory(0).device_index == 1
    assert read(mapping.memory(0)) == b"on chip 0"
    mapping.close()
    close_all(fds)
    assert settled(reordered) == {}


def test_a_mig_instance_is_a_device_like_any_other() -> None:
    mig = gpu_info(0, name="Fake GPU MIG 1g.10gb", uuid="MIG-11111111-2222-3333-4444-555555555555")
    assert CudaBackend(mig.uuid, FakeDriver(mig)).device == mig.uuid


def test_an_fd_that_is_no_gpu_memory_is_refused(driver: FakeDriver, backend: CudaBackend) -> None:
    with memfd("plain", GRANULARITY) as fd, pytest.raises(SegmentError, match="import segment 0: CUDA_ERROR"):
        backend.map([fd], [10])
    assert driver.live() == {}


def test_an_fd_shorter_than_promised_is_refused(driver: FakeDriver, backend: CudaBackend) -> None:
    fds = publish(backend, b"short")
    with pytest.raises(SegmentError, match="map segment 0: CUDA_ERROR_INVALID_VALUE"):
        backend.map(fds, [GRANULARITY + 1])
    close_all(fds)
    assert settled(driver) == {}


def test_too_little_memory_names_needed_free_and_holders(
    driver: FakeDriver, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wcache.weights.segment_cuda.holders", lambda _: ["trainer (pid 7) 5 MiB"])
    with pytest.raises(OutOfMemory) as error:
        backend.create("big", CAPACITY + 1)
    for part in (str(CAPACITY + GRANULARITY), str(CAPACITY), "trainer (pid 7) 5 MiB", "segment big"):
        assert part in str(error.value)
    driver.fail("create", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY: needs 65536 bytes"):
        backend.create("taken meanwhile", 1)
    assert settled(driver) == {}


def test_a_gpu_that_shares_the_hosts_memory_counts_page_cache_as_available() -> None:
    driver = FakeDriver(gpu_info(0, integrated=True))
    driver.open(0).capacity = 0
    assert CudaBackend(uuid(0), driver).available() > 0


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (gpu_info(0, can_map=False), "virtual memory management"),
        (gpu_info(0, can_share=False), "file descriptors"),
    ],
)
def test_a_gpu_that_cannot_share_memory_is_refused_with_a_hint(info: gpus.GpuInfo, said: str) -> None:
    with pytest.raises(BackendError, match=said) as error:
        CudaBackend(uuid(0), FakeDriver(info))
    assert error.value.hint


def test_a_gpu_that_is_not_visible_is_refused_with_what_is() -> None:
    with pytest.raises(BackendError, match=uuid(1)) as error:
        CudaBackend(uuid(7), FakeDriver())
    assert "CUDA_VISIBLE_DEVICES" in error.value.hint


def test_ranks_without_configured_devices_take_the_visible_gpus_in_order() -> None:
    driver = FakeDriver(gpu_info(0, number=3), gpu_info(1, number=2))
    assert [gpus.at(driver, position).uuid for position in (0, 1)] == [uuid(3), uuid(2)]
    with pytest.raises(BackendError, match="2 are visible"):
        gpus.at(driver, 2)


def test_a_forked_child_leaves_the_parents_mapping_alone(driver: FakeDriver, backend: CudaBackend) -> None:
    fds = publish(backend, b"parent")
    mapping = backend.map(fds, [6])
    close_all(fds)
    child = os.fork()
    if child == 0:
        before = driver.calls["unmap"]
        mapping.close()
        gc.collect()
        os._exit(driver.calls["unmap"] - before)
    assert os.waitpid(child, 0)[1] == 0
    assert read(mapping.memory(0)) == b"parent"
    mapping.close()


def test_a_mapping_alive_at_exit_ends_the_process_quietly() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fake_cuda import FakeDriver, uuid\n"
        "from wcache.weights.segment_cuda import CudaBackend\n"
        "driver = FakeDriver(); driver.fail('unmap', after=1)\n"
        "segment = CudaBackend(uuid(0), driver).create('s', 10)\n"
        "fd = segment.seal(); mapping = CudaBackend(uuid(0), driver).map([fd], [10])\n"
    )
    tests = str(Path(__file__).resolve().parent.parent)
    run = subprocess.run([sys.executable, "-c", script, tests], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_every_error_of_the_driver_is_one_of_ours() -> None:
    for error in ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_UNKNOWN"):
        assert isinstance(gpus.failure(error, "do", "it"), WcacheError)
    assert isinstance(gpus.failure("CUDA_ERROR_OUT_OF_MEMORY", "do", "it"), OutOfMemory)
    assert isinstance(gpus.failure("CUDA_ERROR_NO_DEVICE", "do", "it"), BackendError)


def test_memory_is_what_a_lease_can_watch(backend: CudaBackend) -> None:
    fds = publish(backend, b"x")
    mapping: CudaMapping = backend.map(fds, [1])
    close_all(fds)
    died: list[int] = []
    weakref.finalize(mapping.memory(0), died.append, 1)
    mapping.close()
    gc.collect()
    assert died == [1]
