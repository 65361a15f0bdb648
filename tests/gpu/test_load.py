# SPDX-License-Identifier: Apache-2.0
"""Loading on a real GPU: every byte as safetensors reads it, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wcache.host.fds import close_all
from wcache.host.gpu_memory import MIB, measure

Spawn = Callable[..., Any]
OVERHEAD_BYTES = 600 * MIB  # what any process with a context costs (527 MiB on an H200), and nothing else may be taken


@pytest.mark.keeps("torch's thread pool, which made the checkpoint")
@pytest.mark.parametrize(
    ("tp", "rank", "dtype"), [(1, 0, "auto"), (2, 0, "auto"), (2, 1, "auto"), (4, 3, "auto"), (2, 1, "float32")]
)
def test_every_tensor_of_a_rank_is_the_slice_that_safetensors_reads(
    spawn: Spawn, gpu: str, checkpoint: Path, tp: int, rank: int, dtype: str
) -> None:
    answer = spawn("loader").ask(gpu=gpu, directory=str(checkpoint), tp=tp, rank=rank, dtype=dtype)
    assert answer["wrong"] == [] and answer["digests"]
    assert answer["seen"] == answer["tensors"] == 75


def test_a_load_takes_the_weights_and_one_context_and_keeps_the_weights_alone(
    spawn: Spawn, gpu: str, checkpoint: Path, peak: Callable[[], Any], memory_comes_back: int, wait_until: Any
) -> None:
    child = spawn("loader")
    with peak() as most:
        answer, fds = child.ask_fds(gpu=gpu, directory=str(checkpoint), tp=1, rank=0, dtype="auto", only_load=True)
        child.kill()
    kept = memory_comes_back + answer["weights"]
    try:
        assert most.used - kept <= OVERHEAD_BYTES
        wait_until(lambda: abs(measure(gpu).used - kept) <= 2 * MIB, 10, "exactly the weights stay")
    finally:
        close_all(fds)
