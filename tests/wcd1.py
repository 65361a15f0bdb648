# SPDX-License-Identifier: Apache-2.0
"""The digest wcd1 written twice more, from the maths in digest.cu: word by word, and with numpy for larger inputs."""

from __future__ import annotations

import numpy as np

PHI, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def words_slowly(data: bytes) -> tuple[int, int]:
    """Sum and xor of the mixed words, in plain Python."""
    total = xored = 0
    for i in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        position = (i + 1) * PHI & MASK
        x = (word ^ position) * M1 & MASK
        x = ((x ^ x >> 32) + position) * M2 & MASK
        x ^= x >> 32
        total = (total + x) & MASK
        xored ^= x
    return total, xored


def words(data: bytes | memoryview) -> tuple[int, int]:
    """Sum and xor of the mixed words, with numpy."""
    total = xored = 0
    block = 1 << 24
    for start in range(0, len(data), block):
        part = bytes(data[start : start + block])
        array = np.frombuffer(part + bytes(-len(part) % 8), dtype="<u8")
        first = np.uint64(start // 8 + 1)
        with np.errstate(over="ignore"):
            position = (np.arange(len(array), dtype=np.uint64) + first) * np.uint64(PHI)
            x = (array ^ position) * np.uint64(M1)
            x = ((x ^ (x >> np.uint64(32))) + position) * np.uint64(M2)
            x ^= x >> np.uint64(32)
            total = (total + int(x.sum(dtype=np.uint64))) & MASK
        xored ^= int(np.bitwise_xor.reduce(x)) if len(x) else 0
    return total, xored


def text(lanes: tuple[int, int], size: int) -> str:
    """The finished digest."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * M1 & MASK
        x = (x ^ x >> 27) * M2 & MASK
        return x ^ x >> 31

    first = mix((lanes[0] + size * PHI) & MASK)
    return f"wcd1:{first:016x}{mix((lanes[1] ^ first) + size & MASK):016x}"


def digest(data: bytes | memoryview) -> str:
    return text(words(data), len(data))
