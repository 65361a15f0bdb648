# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: canonical, complete, and different whenever a field is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import FingerprintError
from wcache.weights.fingerprint import ABSENT, Fingerprint, LayoutKey, canonical_json, differences

BASE = LayoutKey(
    engine="e", engine_version="1", architecture="A", dtype="bfloat16", quantization={"bits": 4, "g": {"s": 1}}
)

OTHER: dict[str, Any] = {
    "engine": "f", "engine_version": "2", "architecture": "B", "dtype": "float16", "tp_size": 2, "tp_rank": 1,
    "pp_size": 2, "pp_rank": 1, "dp_size": 2, "dp_rank": 1, "ep_size": 2, "ep_rank": 1, "role": "draft",
    "quantization": {"bits": 8, "g": {"s": 1}}, "rope": {"theta": 1.0}, "max_model_len": 64, "kv_cache_dtype": "fp8",
    "revision": "r", "plan": "p", "kernel_backends": {"linear": "x"}, "device_capability": "9.0",
    "torch_version": "2", "cuda_version": "13", "environment": {"X": "1"}, "extra": {"y": 1},
}  # fmt: skip


def test_every_field_of_the_layout_has_a_case_here() -> None:
    assert set(OTHER) == set(LayoutKey.__struct_fields__)


@pytest.mark.parametrize("field", sorted(OTHER))
def test_one_wrong_field_is_another_fingerprint_and_the_difference_names_it(field: str) -> None:
    resident = Fingerprint("c" * 64, BASE)
    asked = msgspec.structs.replace(BASE, **{field: OTHER[field]})
    assert Fingerprint("c" * 64, asked).id != resident.id
    found = differences("c" * 64, asked, resident)
    assert found
    assert all(d.field.startswith(f"layout.{field}") for d in found)


def test_nested_differences_name_the_leaf_with_both_values() -> None:
    asked = msgspec.structs.replace(BASE, quantization={"bits": 8, "g": {"s": 1}})
    (d,) = differences("c", asked, Fingerprint("c", BASE))
    assert (d.field, d.asked, d.resident) == ("layout.quantization.bits", 8, 4)


def test_a_missing_nested_field_is_shown_as_absent() -> None:
    asked = msgspec.structs.replace(BASE, quantization={"bits": 4})
    (d,) = differences(None, asked, Fingerprint("c", BASE))
    assert (d.field, d.asked) == ("layout.quantization.g.s", ABSENT)


def test_another_content_is_named_first() -> None:
    found = differences("d" * 64, BASE, Fingerprint("c" * 64, BASE))
    assert [d.field for d in found] == ["checkpoint.content"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), plain, max_size=6))
def test_order_of_insertion_does_not_matter(value: dict[str, Any]) -> None:
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": Opaque()}}, ["a.b", "Opaque"]),
        ({"a": [1, {2: 3}]}, ["a[1]", "2"]),
        ({"x": float("nan")}, ["x", "nan"]),
        ({"x": b"bytes"}, ["x", "bytes"]),
        ({"x": {1, 2}}, ["x", "set"]),
    ],
)
def test_a_value_without_a_canonical_form_is_an_error_that_names_it(value: Any, words: list[str]) -> None:
    with pytest.raises(FingerprintError) as e:
        canonical_json(value)
    for word in words:
        assert word in str(e.value)


def test_true_and_one_are_different() -> None:
    assert canonical_json({"x": True}) != canonical_json({"x": 1})


def test_two_processes_with_different_hash_seeds_agree() -> None:
    code = (
        "from wcache.weights.fingerprint import *;"
        "print(Fingerprint('c', LayoutKey(engine='e', engine_version='1', architecture='A', dtype='d',"
        " quantization={k: {j: k for j in 'zyx'} for k in 'gfedcba'})).id)"
    )
    ids = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(ids) == 1
