"""Initial values as a function of (seed, parameter name, element): never of rank, world size or unit.

Each parameter is cut into blocks of 2^16 elements and each block has a generator of its own, keyed by
the seed, the parameter's name and the block's number. A rank that owns elements [start, stop) draws only
the blocks that touch them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

BLOCK = 1 << 16


@dataclass(frozen=True)
class Normal:
    """Independent normal values with mean 0 and standard deviation `std`."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


Init = Normal | Constant


def fill(init: Init, seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) of the flattened parameter `name`, float32."""
    if isinstance(init, Constant):
        return np.full(stop - start, init.value, np.float32)
    out = np.empty(stop - start, np.float32)
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first = block * BLOCK
        key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
        values = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).standard_normal(BLOCK, np.float32)
        lo, hi = max(first, start), min(first + BLOCK, stop)
        np.multiply(values[lo - first:hi - first], np.float32(init.std), out=out[lo - start:hi - start])
    return out
