"""Numbers of 8 bits on the CPU: weights on their way, and products of matrices rounded to them.

No CPU multiplies such numbers, so a product costs what it did and the rounding besides, by ml_dtypes, some 60 ms for each four
million elements. It is here to see what the format does to a loss curve, and for a GPU's to be compared with.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from mpshard.device.numpy_dense import DenseKernels
from mpshard.device.numpy_memory import block_rows, blocks

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BLOCK = 128  # elements that share a scale where weights travel so
LARGEST_SCALE = 120  # as a power of two: it and one over it are ordinary float32 numbers, as all below are


class Fp8Kernels(DenseKernels):
    """The 8-bit part of `mpshard.device.base.Device`."""

    fp8_products = "by rounding alone"

    def matmul_fp8(
        self, a: np.ndarray, b: np.ndarray, gradients: tuple[bool, bool] = (False, False), out: np.ndarray | None = None,
        accumulate: bool = False, bias: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        a, b = (self.round_to_fp8(x, gradient) for x, gradient in zip((a, b), gradients, strict=True))
        return self.matmul(a, b, out, accumulate, bias)

    def pack_fp8(self, x: np.ndarray, words: np.ndarray) -> None:
        n, blocks = x.size, -(-x.size // BLOCK)
        padded = np.zeros(blocks * BLOCK, np.float32)
        padded[:n] = x
        rows = padded.reshape(blocks, BLOCK)
        largest = np.abs(rows).max(axis=1)
        fraction, exponent = np.frexp(np.maximum(largest, np.float32(2.0**-100)))  # 448 is 0.875 * 2^9
        exponent = np.where(np.isfinite(largest), (9 - exponent - (fraction > 0.875)).clip(-100, 100), 0)
        with np.errstate(invalid="ignore"):
            rows *= np.where(np.isfinite(largest), np.ldexp(np.float32(1), exponent), np.float32(np.nan))[:, None]
        words[:n] = padded[:n].astype(E4M3).view(np.uint8)
        words[n:] = (exponent + 127).astype(np.uint8)

    def unpack_fp8(self, words: np.ndarray, out: np.ndarray, slices: int) -> None:
        n = out.size // slices
        table, whole = np.arange(256, dtype=np.uint8).view(E4M3).astype(out.dtype), n // BLOCK * BLOCK
        for source, target in zip(words.reshape(slices, -1), out.reshape(slices, n), strict=True):
            np.take(table, source[:n], out=target, mode="clip")
            scales = np.ldexp(out.dtype.type(1), 127 - source[n:].astype(np.int32))
            target[:whole].reshape(-1, BLOCK)[...] *= scales[: whole // BLOCK, None]
            target[whole:] *= scales[whole // BLOCK :].repeat(n - whole)

    def round_to_fp8(self, x: np.ndarray, gradient: bool) -> np.ndarray:
        """x (m, k) rounded as `matmul_fp8` says: a new array of its type, which lies as x does."""
        if not x.flags.c_contiguous and x.T.flags.c_contiguous:
            return self.round_to_fp8(x.T, gradient).T
        out = self.empty(x.shape, x.dtype)
        if not x.size:
            return out
        form, row_bytes = E5M2 if gradient else E4M3, x.shape[1] * x.itemsize
        scale = scale_to_fp8(float(np.maximum(x.max(), -x.min())), form)  # of NaN NaN, unlike Python's
        scratch = self.empty((block_rows(len(x), row_bytes), x.shape[1]), x.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite, and is looked for
            for block in blocks(len(x), row_bytes):
                scaled = np.multiply(x[block], scale, out=scratch[: block.stop - block.start])
                np.multiply(scaled.astype(form).astype(x.dtype), 1 / scale, out=out[block])
        return out


def scale_to_fp8(largest: float, form: np.dtype) -> float:
    """The power of two that brings `largest` just under a format's largest number; NaN if `largest` is not finite."""
    if not math.isfinite(largest):
        return math.nan
    top, top_exponent = math.frexp(float(ml_dtypes.finfo(form).max))
    fraction, exponent = math.frexp(largest)
    return 2.0 ** min(LARGEST_SCALE, top_exponent - exponent - (fraction > top))
