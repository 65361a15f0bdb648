# SPDX-License-Identifier: Apache-2.0
"""GPU memory in the status of ranks: asked of NVML by UUID, once a GPU; nothing changes where it cannot be asked."""

from __future__ import annotations

import msgspec
import pytest

from wcache.cli import gpu
from wcache.cli.gpu import with_memory
from wcache.errors import BackendError, Unavailable
from wcache.host.gpu_memory import GpuUse, Holder
from wcache.model import BackendName, IdentityPolicy, Mode, Origin, RankState, ShardState
from wcache.protocol.messages import LeaseInfo, RankStatus, ShardInfo
from wcache.weights.fingerprint import LayoutKey

GIB = 1 << 30


def shard(size: int, *pids: int | None, state: ShardState = ShardState.RESIDENT) -> ShardInfo:
    return ShardInfo(
        fingerprint="f" * 64, content="c" * 64, generation=1, state=state, origin=Origin.PRELOAD, model="m",
        dtype="bfloat16", engine="e", tensors=1, weight_bytes=size, segment_bytes=size, segments=1, created=0.0,
        restored=False, verified=None, layout=LayoutKey(engine="e", engine_version="1", architecture="A", dtype="b"),
        leases=tuple(LeaseInfo(name="e", pid=pid, uid=0, since=0.0, mode=Mode.ZERO_COPY) for pid in pids),
    )  # fmt: skip


def rank(number: int, device: str, *shards: ShardInfo, backend: BackendName = BackendName.CUDA) -> RankStatus:
    return RankStatus(
        rank=number, state=RankState.READY, device=device, backend=backend, mode=Mode.ZERO_COPY,
        policy=IdentityPolicy.CONTENT, model=None, pid=1, nonce="n", version="0", since=0.0, text="", shards=shards,
        memory={"weights": 7},
    )  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which GPUs NVML was asked about. Each has 30 GiB in use, 2 by pid 10 and 1 by pid 11."""
    seen: list[str] = []

    def measure(uuid: str) -> GpuUse:
        seen.append(uuid)
        return GpuUse(uuid, 140 * GIB, 30 * GIB, GIB, (Holder(10, "vllm", 2 * GIB), Holder(11, "train", GIB)))

    monkeypatch.setattr(gpu, "measure", measure)
    return seen


def test_every_byte_of_a_ranks_gpu_is_in_its_status(asked: list[str]) -> None:
    memory = with_memory({0: rank(0, "GPU-a", shard(27 * GIB, 10, None))})[0].memory
    assert memory["weights"] + memory["engines"] + memory["others"] + memory["unexplained"] == memory["used"]
    assert (memory["weights"], memory["engines"], memory["others"]) == (27 * GIB, 2 * GIB, GIB)
    assert asked == ["GPU-a"]


def test_ranks_on_one_gpu_share_its_account(asked: list[str]) -> None:
    found = with_memory({0: rank(0, "GPU-a", shard(20 * GIB)), 1: rank(1, "GPU-a", shard(7 * GIB, 10))})
    assert found[0].memory == found[1].memory
    assert found[0].memory["weights"] == 27 * GIB and asked == ["GPU-a"]


def test_a_quarantined_shard_holds_nothing(asked: list[str]) -> None:
    memory = with_memory({0: rank(0, "GPU-a", shard(27 * GIB, state=ShardState.QUARANTINED))})[0].memory
    assert (memory["weights"], memory["unexplained"]) == (0, 27 * GIB)


def test_host_ranks_and_ranks_that_do_not_answer_are_left_alone(asked: list[str]) -> None:
    host, silent = rank(0, "cpu", backend=BackendName.HOST), Unavailable("nobody")
    assert with_memory({0: host, 1: silent, 2: msgspec.structs.replace(rank(2, ""))}) == {
        0: host, 1: silent, 2: rank(2, ""),
    }  # fmt: skip
    assert asked == []


def test_without_nvml_the_ranks_own_figure_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(uuid: str) -> GpuUse:
        raise BackendError(f"no NVML for {uuid}")

    monkeypatch.setattr(gpu, "measure", measure)
    assert with_memory({0: rank(0, "GPU-a")})[0].memory == {"weights": 7}
