# SPDX-License-Identifier: Apache-2.0
"""The lines of an engine's log that operators grep for."""

from __future__ import annotations

MAPPED = "Mapped {} tensors from the weight cache daemon ({} mode)"


def mapped(log: list[str]) -> list[str]:
    return [line for line in log if line.startswith("Mapped ")]


def unusable(log: list[str]) -> list[str]:
    return [line for line in log if line.startswith("Weight cache unusable (")]
