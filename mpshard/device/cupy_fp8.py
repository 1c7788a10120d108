"""Numbers of 8 bits on a GPU: weights on their way, and products of matrices rounded to them.

The scale of a matrix stays on the GPU: a kernel finds the largest magnitude, the next one reads it there. cuBLASLt multiplies the
8 bits themselves where it can. Elsewhere, on older GPUs and for shapes it has nothing for, the rounded numbers are written in
their old type again, which holds them, and multiplied like others: the same up to the order of sums, and no faster than without.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpshard.device.base import Array
from mpshard.device.cupy_memory import CupyMemory, orientation
from mpshard.device.numpy_fp8 import BLOCK

MAGNITUDE_BLOCKS = 1024  # each adds its maximum to the same word
WARPS = 8  # of a block of `pack_fp8`, each with one block of elements
TILE = 64  # rows and columns that a block of `to_fp8_turned` takes at a time
TILES_DOWN = 1 << 15  # blocks below each other, of which CUDA takes fewer than side by side; each goes on by as many tiles


class Fp8Matrix(NamedTuple):
    """words (lines, k) uint8, of which k are multiplied and summed; scale (1,) float32: what they are to be multiplied with."""

    words: Array
    scale: Array


class Fp8Kernels(CupyMemory):
    """The 8-bit part of `mpshard.device.base.Device`, but for the products themselves.

    fp8_library: cuBLASLt's products of 8 bits, see `cupy_cublaslt`; None: all are made as the others are.
    """

    fp8_library: Any = None

    @property
    def fp8_products(self) -> str:
        return f"by {self.fp8_library.about}" if self.fp8_library is not None else "by rounding alone"

    def pack_fp8(self, x: Array, words: Array) -> None:
        blocks = -(-x.size // BLOCK)
        if blocks:
            self.launch("pack_fp8", (-(-blocks // WARPS),), 32 * WARPS, (x, words, x.size), x.dtype)

    def unpack_fp8(self, words: Array, out: Array, slices: int) -> None:
        self._elementwise("unpack_fp8", out.size, (words, out, out.size // slices, out.size), out.dtype)

    def round_to_fp8(self, x: Array, gradient: bool) -> Array:
        """x (m, k) rounded as `matmul_fp8` says: a new array of its type, which lies as x does."""
        if not x.size:
            return x
        lying, turned = self._as_it_lies(x)
        out = self.empty(lying.shape, x.dtype)
        self._elementwise("round_to_fp8", x.size, (lying, out, self._largest(lying), x.size, gradient), x.dtype)
        return out.T if turned else out

    def to_fp8(self, x: Array, gradient: bool) -> Fp8Matrix:
        """x (m, k), not empty, as 8 bits; a transposed view is turned, so that rows are contiguous."""
        lying, turned = self._as_it_lies(x)
        made = Fp8Matrix(self.empty(x.shape, np.uint8), self.empty(1, np.float32))
        args = (lying, *made, self._largest(lying))
        if turned:
            rows, columns = lying.shape
            grid = -(-columns // TILE), min(-(-rows // TILE), TILES_DOWN)
            self.launch("to_fp8_turned", grid, 256, (*args, rows, columns, gradient), x.dtype)
        else:
            self._elementwise("to_fp8", x.size, (*args, x.size, gradient), x.dtype)
        return made

    def _largest(self, x: Array) -> Array:
        """(1,) uint32: the bits of the largest magnitude in a contiguous array."""
        largest = self.zeros(1, np.uint32)
        self.launch("largest_magnitude", (min(-(-x.size // 1024), MAGNITUDE_BLOCKS),), 256, (x, largest, x.size), x.dtype)
        return largest

    def _as_it_lies(self, x: Array) -> tuple[Array, bool]:
        """x, or its transpose if that is what lies row by row (a copy where there are gaps), and which of the two."""
        turned, step = orientation(x)
        lying = x.T if turned else x
        if step > max(1, lying.shape[1]):
            whole = self.empty(lying.shape, x.dtype)
            whole[...] = lying
            lying = whole
        return lying, bool(turned)
