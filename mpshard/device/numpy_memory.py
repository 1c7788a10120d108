"""Memory of the NumPy device, and how its kernels walk through arrays.

Note on blocks. An elementwise kernel is a dozen passes of one ufunc each. Over a whole activation every
pass would go to main memory; over a block that stays in the second-level cache only the first and the last do.
A ufunc call costs 0.5 us, so blocks should not be small either: 256 KiB an array measured best (two or
three arrays of it fit the 0.5 to 2 MiB that cores have; a few more come from a fast third level).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np

from mpshard.device.base import Kind, Memory
from mpshard.device.pool import ALIGNMENT, BufferPool

BLOCK_BYTES = 256 << 10  # of one array of a block


def blocks(rows: int, row_bytes: int, budget: int = BLOCK_BYTES) -> Iterator[slice]:
    """Slices that cover range(rows), as many rows each as fit `budget` bytes (at least one)."""
    step = block_rows(rows, row_bytes, budget)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def block_rows(rows: int, row_bytes: int, budget: int = BLOCK_BYTES) -> int:
    """The rows of the largest block of `blocks`: what scratch memory must hold."""
    return max(1, min(rows, budget // max(1, row_bytes)))


def flat(array: np.ndarray) -> np.ndarray:
    """A one-dimensional view. Raises ValueError where that would take a copy (the array is not contiguous)."""
    return array.reshape(-1, copy=False)


def rows_of(array: np.ndarray) -> np.ndarray:
    """A (rows, last axis) view. Raises ValueError where that would take a copy."""
    return array.reshape(-1, array.shape[-1], copy=False)


class NumpyMemory:
    """The memory part of `mpshard.device.base.Device`; the kernels' classes build on it."""

    name = about = "numpy"
    on_host = True
    xp: ModuleType = np

    def __init__(self, poison: bool = False) -> None:
        pool = BufferPool(poison)
        self.memory: Memory = pool
        self.poison = poison
        self.empty = pool.empty

    def scratch(self, dtype: Any, *sizes: int) -> list[np.ndarray]:
        """Uninitialised flat arrays of one dtype, cut from one block of the pool, each aligned to a cache line."""
        unit = max(1, ALIGNMENT // np.dtype(dtype).itemsize)
        ends = list(accumulate(-(-size // unit) * unit for size in sizes))
        whole = self.empty(ends[-1], dtype)
        return [whole[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]

    def zeros(self, shape: int | tuple[int, ...], dtype: Any, kind: Kind = Kind.ACTIVATION) -> np.ndarray:
        out = self.empty(shape, dtype, kind)
        out.fill(0)
        return out

    def from_host(self, array: Any, kind: Kind = Kind.ACTIVATION) -> np.ndarray:
        array = np.asarray(array)
        out = self.empty(array.shape, array.dtype, kind)
        np.copyto(out, array)
        return out

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def host_bytes(self, nbytes: int) -> np.ndarray:
        return self.empty(nbytes, np.uint8, Kind.STAGING)

    def read(self, scalars: Sequence[float]) -> np.ndarray:
        return np.array(scalars, np.float64)

    def recorder(self) -> Any:
        return None

    def synchronise(self) -> None:
        """Nothing to wait for: NumPy has done its work when it returns."""
