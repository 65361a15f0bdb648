# SPDX-License-Identifier: Apache-2.0
"""Segments on a real GPU: they outlive who made them, cannot be written by engines, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wcache.host.fds import OwnedFd, close_all
from wcache.host.gpu_memory import MIB, account, measure

SIZES = [(64 << 20) - 4096, 4 << 20, 1, 300 << 20]
GRANTED = (64 + 4 + 2 + 300) * MIB  # at 2 MiB granularity
Spawn = Callable[..., Any]


@pytest.fixture
def segments(spawn: Spawn, gpu: str) -> Any:
    """Descriptors of segments whose maker was killed, and their digests. This process has no CUDA."""
    exporter = spawn("exporter")
    answer, fds = exporter.ask_fds(gpu=gpu, sizes=SIZES)
    exporter.kill()
    yield answer["digests"], fds
    close_all(fds)


def test_a_segments_descriptor_is_one_of_the_driver(segments: tuple[list[str], list[OwnedFd]]) -> None:
    assert [str(Path(f"/proc/self/fd/{fd.fileno()}").readlink()) for fd in segments[1]] == ["/dev/nvidiactl"] * len(
        SIZES
    )


def test_segments_live_on_by_their_fds_alone_and_cost_exactly_their_size(
    gpu: str, segments: tuple[list[str], list[OwnedFd]], memory_comes_back: int, wait_until: Callable[..., None]
) -> None:
    wait_until(lambda: measure(gpu).used <= memory_comes_back + GRANTED + 2 * MIB, 10, "the exporter's context is gone")
    assert abs(measure(gpu).used - memory_comes_back - GRANTED) <= 2 * MIB
    split = account(measure(gpu), GRANTED, ())
    assert (split.weights, split.missing) == (GRANTED, 0)


def test_a_new_process_maps_the_same_bytes_in_one_contiguous_range(
    spawn: Spawn, gpu: str, segments: tuple[list[str], list[OwnedFd]]
) -> None:
    digests, fds = segments
    for access in ("r", "rw"):
        answer = spawn("importer").ask(fds, gpu=gpu, sizes=SIZES, access=access)
        assert answer["digests"] == digests
        assert answer["ends"] == [[i + 1, i + 1] for i in range(len(SIZES))]
        assert answer["contiguous"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_uid_maps_segments_it_was_handed(
    spawn: Spawn, gpu: str, segments: tuple[list[str], list[OwnedFd]]
) -> None:
    digests, fds = segments
    answer = spawn("importer").ask(fds, gpu=gpu, sizes=SIZES, uid=65534)
    assert (answer["uid"], answer["digests"]) == (65534, digests)


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_process_in_its_own_pid_ipc_and_network_namespaces_maps_segments(
    spawn: Spawn, gpu: str, segments: tuple[list[str], list[OwnedFd]]
) -> None:
    digests, fds = segments
    unshare = shutil.which("unshare")
    assert unshare, "util-linux is not installed"
    namespaces = (unshare, "--pid", "--ipc", "--net", "--mount-proc", "--fork", "--kill-child")
    if subprocess.run([*namespaces, "true"], check=False).returncode:
        pytest.skip("this machine does not let root make namespaces")
    answer = spawn("importer", prefix=namespaces).ask(fds, gpu=gpu, sizes=SIZES)
    assert answer["digests"] == digests


def test_a_stray_kernel_write_ends_the_writer_and_nobody_else(
    spawn: Spawn, gpu: str, segments: tuple[list[str], list[OwnedFd]]
) -> None:
    digests, fds = segments
    neighbour = spawn("reader")
    before = neighbour.ask([fds[1]], gpu=gpu, sizes=[SIZES[1]])
    said = spawn("stray_writer").ask([fds[1]], gpu=gpu, sizes=[SIZES[1]])["said"]
    assert "illegal memory access" in said[0] and said[1], "the write went through, or the writer did not notice"
    assert neighbour.ask() == before
    assert before == {"sum": 2 * SIZES[1], "digest": digests[1]}


def test_a_writer_that_asked_for_rw_writes(spawn: Spawn, gpu: str, segments: tuple[list[str], list[OwnedFd]]) -> None:
    _, fds = segments
    assert spawn("writes").ask([fds[1]], gpu=gpu, sizes=[SIZES[1]])["head"] == [3, 3, 7]


def test_what_is_no_gpu_memory_is_refused(spawn: Spawn, gpu: str) -> None:
    read, write = os.pipe()
    os.close(write)
    with OwnedFd(read) as pipe:
        answer = spawn("refused").ask([pipe], gpu=gpu, sizes=[1])
    assert answer["code"] == "segment", answer


def test_an_fd_shorter_than_promised_is_refused(
    spawn: Spawn, gpu: str, segments: tuple[list[str], list[OwnedFd]]
) -> None:
    answer = spawn("refused").ask([segments[1][1]], gpu=gpu, sizes=[5 << 20])
    assert answer["code"] == "segment" and "map segment 0" in answer["message"], answer


def test_memory_of_one_gpu_is_refused_on_another(
    spawn: Spawn, gpus: list[str], segments: tuple[list[str], list[OwnedFd]]
) -> None:
    if len(gpus) < 2:
        pytest.skip("one GPU")
    answer = spawn("refused").ask(segments[1], gpu=gpus[1], sizes=SIZES)
    assert answer["code"] == "device_mismatch"
    assert gpus[0] in answer["message"] and gpus[1] in answer["message"]


def test_a_gpu_is_found_by_uuid_whatever_cuda_visible_devices_says(
    spawn: Spawn, gpus: list[str], segments: tuple[list[str], list[OwnedFd]]
) -> None:
    digests, fds = segments
    shown = [gpus[0], ",".join(reversed(gpus))]
    for visible in shown:
        child = spawn("importer", env={"CUDA_VISIBLE_DEVICES": visible})
        assert child.ask(fds, gpu=gpus[0], sizes=SIZES)["digests"] == digests


def test_five_hundred_segments_travel_and_map(spawn: Spawn, gpu: str, wait_until: Callable[..., None]) -> None:
    sizes = [2 << 20] * 500
    exporter = spawn("exporter")
    answer, fds = exporter.ask_fds(gpu=gpu, sizes=sizes)
    exporter.kill()
    try:
        found = spawn("importer").ask(fds, gpu=gpu, sizes=sizes)
    finally:
        close_all(fds)
    assert found["digests"] == answer["digests"] and len(fds) == 500


def test_a_hundred_mappings_in_one_process_leave_nothing(
    spawn: Spawn, gpu: str, segments: tuple[list[str], list[OwnedFd]]
) -> None:
    _, fds = segments
    child = spawn("importer")
    child.ask(fds, gpu=gpu, sizes=SIZES)
    used = measure(gpu).used
    for _ in range(100):
        child.ask(fds, gpu=gpu, sizes=SIZES)
    assert measure(gpu).used <= used + 4 * MIB


def test_the_digest_on_the_gpu_is_the_references_and_shows_every_damage(spawn: Spawn, gpu: str) -> None:
    answer = spawn("digester").ask(gpu=gpu)
    assert answer["wrong"] == [] and answer["sizes"] > 10
