# SPDX-License-Identifier: Apache-2.0
"""Packing of storages into segments."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.weights.layout import align, pack
from wcache.weights.manifest import ALIGNMENT
from wcache.weights.segment import SEGMENT_BYTES

SIZES = st.lists(st.one_of(st.integers(0, 600), st.integers(0, 1 << 20), st.integers(0, 3 << 20)), max_size=60)


@given(sizes=SIZES, granularity=st.sampled_from([4096, 2 << 20]), limit=st.sampled_from([64 << 10, 1 << 20, 1 << 30]))
def test_storages_are_aligned_inside_their_segment_and_never_overlap(
    sizes: list[int], granularity: int, limit: int
) -> None:
    packing = pack(sizes, granularity, limit)
    assert len(packing.places) == len(sizes)
    end = [0] * len(packing.segments)
    for size, (segment, offset) in sorted(zip(sizes, packing.places, strict=True), key=lambda p: p[1]):
        if size == 0:
            continue
        assert offset % ALIGNMENT == 0
        assert offset >= end[segment]
        end[segment] = offset + size
    assert tuple(end) == packing.segments
    for segment, used in enumerate(end):
        if used > limit:
            assert [s for s, p in zip(sizes, packing.places, strict=True) if p[0] == segment and s] == [used]


@given(sizes=SIZES, granularity=st.sampled_from([4096, 2 << 20]), limit=st.sampled_from([64 << 10, 1 << 20, 1 << 30]))
def test_what_is_lost_is_padding_of_storages_and_one_granule_a_segment(
    sizes: list[int], granularity: int, limit: int
) -> None:
    packing = pack(sizes, granularity, limit)
    lost = packing.aligned_bytes - sum(sizes)
    assert 0 <= lost <= ALIGNMENT * len(sizes) + granularity * len(packing.segments)
    padded = sum(align(size, ALIGNMENT) for size in sizes)
    assert len(packing.segments) <= 2 * (padded // limit) + 1 + sum(size > limit for size in sizes)


@given(
    layers=st.integers(1, 120),
    hidden=st.sampled_from([2048, 4096, 5120, 8192]),
    granularity=st.sampled_from([4096, 2 << 20]),
)
def test_a_transformer_wastes_less_than_one_percent(layers: int, hidden: int, granularity: int) -> None:
    layer = [hidden * hidden * 2, hidden * 512, hidden * 512, hidden * hidden * 2, *[hidden * hidden * 7] * 3]
    sizes = [hidden * 128_256 * 2, *[*layer, hidden * 2, hidden * 2] * layers, hidden * 2]
    packing = pack(sizes, granularity)
    assert packing.aligned_bytes <= 1.01 * sum(sizes)
    assert max(packing.segments) <= max(SEGMENT_BYTES, *sizes)


def test_a_small_model_gets_one_segment_that_fits() -> None:
    packing = pack([1000, 0, 24], 4096)
    assert packing.segments == (1048,)
    assert packing.places == ((0, 0), (0, 0), (0, 1024))
    assert packing.aligned_bytes == 4096


def test_nothing_but_empty_storages_takes_no_segment() -> None:
    assert pack([0, 0], 4096).segments == ()


def test_a_storage_beyond_the_limit_gets_its_own_segment_and_does_not_split_the_others() -> None:
    packing = pack([100, 5000, 100], 4096, limit=4096)
    assert packing.segments == (356, 5000)
    assert packing.places == ((0, 0), (1, 0), (0, 256))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        pack([-1], 4096)


def test_a_hundred_thousand_storages_are_packed_in_under_a_second() -> None:
    sizes = [(i * 7919) % (4 << 20) for i in range(100_000)]
    started = time.monotonic()
    pack(sizes, 2 << 20)
    assert time.monotonic() - started < 1.0
