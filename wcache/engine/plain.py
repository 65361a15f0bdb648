# SPDX-License-Identifier: Apache-2.0
"""Configurations of engines as plain (JSON) values, for layout keys: what has no canonical form is an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from wcache.errors import FingerprintError


def plain(value: Any, where: str) -> Any:
    """Plain (JSON) values of a configuration. Raises FingerprintError for what has no canonical form."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype | Path):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(v, where) for v in value)
    if isinstance(value, list | tuple):
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(), where)
    raise FingerprintError(f"{where}: a {type(value).__module__}.{type(value).__qualname__} has no canonical form")
