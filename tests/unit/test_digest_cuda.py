# SPDX-License-Identifier: Apache-2.0
"""The digest wcd1: the two references agree, the kernel file is the one that the source makes, and damage shows."""

from __future__ import annotations

import gc
import os
import random
import re
from pathlib import Path

import pytest
import wcd1
from fake_cuda import FakeDriver, uuid, write
from hypothesis import given
from hypothesis import strategies as st

from wcache.weights.digest_cuda import M1, M2, PHI, finish
from wcache.weights.segment_cuda import CudaBackend

KERNELS = Path(__file__).resolve().parents[2] / "wcache" / "weights" / "kernels"


@given(st.binary(max_size=200))
def test_both_references_agree(data: bytes) -> None:
    assert wcd1.words(data) == wcd1.words_slowly(data)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_changed_byte_changes_both_lanes(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[at] ^= draw.draw(st.integers(1, 255))
    before, after = wcd1.words(data), wcd1.words(bytes(changed))
    assert before[0] != after[0] and before[1] != after[1]


def test_the_place_of_every_word_counts() -> None:
    words = [bytes([i]) * 8 for i in range(8)]
    seen = set()
    for _ in range(200):
        random.Random(len(seen)).shuffle(words)
        seen.add(b"".join(words))
    assert len({wcd1.digest(data) for data in seen}) == len(seen)


def test_zeros_of_different_lengths_differ() -> None:
    assert len({wcd1.digest(bytes(n)) for n in range(100)}) == 100


def test_known_values_never_change() -> None:
    assert wcd1.digest(b"") == finish(0, 0, 0) == "wcd1:00000000000000000000000000000000"
    assert wcd1.digest(b"wcache") == KNOWN["wcache"]
    assert wcd1.digest(bytes(range(256)) * 64) == KNOWN["bytes"]


KNOWN = {"wcache": "wcd1:d80b39fa56b7110dafbff7ef0300e566", "bytes": "wcd1:4b0f1d48cb85af6ed44bdb1d85d80dac"}


def test_the_host_and_the_kernel_use_the_same_constants() -> None:
    source = (KERNELS / "digest.cu").read_text()
    found = dict(re.findall(r"static const u64 (\w+) = 0x([0-9A-F]{16})ull;", source))
    assert {name: int(value, 16) for name, value in found.items()} == {"PHI": PHI, "M1": M1, "M2": M2}
    assert (wcd1.PHI, wcd1.M1, wcd1.M2) == (PHI, M1, M2)


def test_the_kernel_is_ptx_that_old_drivers_and_gpus_take() -> None:
    text = (KERNELS / "digest.ptx").read_text()
    assert re.search(r"^\.version 6\.3$", text, re.M) and re.search(r"^\.target sm_75$", text, re.M)
    for constant in (PHI, M1, M2):
        assert str(constant - (1 << 64)) in text, "digest.ptx is older than digest.cu: run scripts/kernels"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 15, 16, 17, 65535, 65536, 65537, 1 << 20])
def test_the_backend_digests_exactly_the_bytes_in_use(size: int) -> None:
    data = os.urandom(size)
    driver = FakeDriver()
    segment = CudaBackend(uuid(0), driver).create("s", size)
    write(segment.memory(), data)
    assert segment.digest() == wcd1.digest(data)
    segment.close()
    assert driver.live(digesters=1) == {}
    del segment
    gc.collect()
    assert driver.live() == {}


@pytest.mark.parametrize("step", ["kernel", "stream", "scratch", "fill", "launch", "copy_out", "wait_stream"])
def test_a_digest_that_fails_at_any_step_leaves_nothing(step: str) -> None:
    driver = FakeDriver()
    segment = CudaBackend(uuid(0), driver).create("s", 10)
    driver.fail(step)
    with pytest.raises(Exception, match="CUDA_ERROR_UNKNOWN"):
        segment.digest()
    driver.heal()
    segment.close()
    del segment
    gc.collect()
    assert driver.live() == {}
