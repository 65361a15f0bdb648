# SPDX-License-Identifier: Apache-2.0
"""Fingerprint = checkpoint identity (content) + layout key (everything that decides how the bytes were processed).

Pure values; runs in every process, never imports torch. Two fingerprints are equal exactly if their canonical JSON is.
A field that has no canonical form is an error that names it: there is no fallback to a repr or a constant.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from wcache.errors import FingerprintError
from wcache.model import Difference

ABSENT = "<absent>"
CONTENT_FIELD = "checkpoint.content"  # beside the fields of the layout


class LayoutKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything besides the checkpoint's bytes that decides what lies in the segments. None: does not apply.

    `quantization`, `rope`, `kernel_backends`, `environment` and `extra` hold plain (JSON) values only.
    """

    engine: str
    engine_version: str
    architecture: str
    dtype: str
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    role: str = "target"  # or "draft"
    quantization: dict[str, Any] | None = None
    rope: dict[str, Any] | None = None
    max_model_len: int | None = None
    kv_cache_dtype: str | None = None
    revision: str | None = None
    plan: str | None = None  # digest of the sharding plan
    kernel_backends: dict[str, Any] | None = None
    device_capability: str | None = None
    torch_version: str | None = None
    cuda_version: str | None = None
    environment: dict[str, str] | None = None
    extra: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Field name to plain value, in order of declaration."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`content`: hex SHA-256 that stands for the checkpoint's bytes (64 characters)."""

    content: str
    layout: LayoutKey

    @property
    def id(self) -> str:
        """Hex SHA-256 of the canonical form (64 characters): the shard's name everywhere."""
        return digest({"content": self.content, "layout": self.layout.fields()})


def canonical_json(value: Any) -> str:
    """One string per value: sorted keys, no spaces, no NaN. Raises FingerprintError naming the offending field."""
    _check_plain(value, "")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of a plain value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def layout_id(layout: LayoutKey) -> str:
    return digest(layout.fields())


def differences(asked_content: str | None, asked: LayoutKey, resident: Fingerprint) -> list[Difference]:
    """Every field in which a request differs from a resident fingerprint, nested fields by dotted path.

    `asked_content` None means: not compared.
    """
    found = []
    if asked_content is not None and asked_content != resident.content:
        found.append(Difference(CONTENT_FIELD, asked_content, resident.content))
    have, want = _flat(resident.layout.fields()), _flat(asked.fields())
    for path in sorted(have.keys() | want.keys()):
        a, r = want.get(path, ABSENT), have.get(path, ABSENT)
        if (a is None and r == ABSENT) or (a == ABSENT and r is None):
            continue  # one side has nothing where the other has fields: those are named one by one
        if canonical_json(a) != canonical_json(r):
            found.append(Difference(f"layout.{path}", a, r))
    return found


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def _check_plain(value: Any, path: str) -> None:
    """Only None, bool, int, finite float, str, and lists and string-keyed dicts of them have one canonical form."""
    where = path or "value"
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise FingerprintError(f"{where}: key {key!r} is a {type(key).__name__}, not a string")
            _check_plain(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]")
    elif type(value) is float and not math.isfinite(value):
        raise FingerprintError(f"{where}: {value} has no canonical form")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise FingerprintError(
            f"{where}: a {type(value).__module__}.{type(value).__qualname__} has no canonical form",
            hint="turn it into plain values (numbers, strings, lists, dicts) first",
        )
