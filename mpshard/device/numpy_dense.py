"""Matrix products, which are BLAS's, and what goes with them: bias, residual sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpshard.device import mkl
from mpshard.device.base import Epilogues
from mpshard.device.numpy_memory import NumpyMemory, block_rows, blocks

PRODUCT_BYTES = 1 << 20  # of an accumulated product's block: read back from the cache, and tall enough for BLAS


class DenseKernels(NumpyMemory):
    """The dense part of `mpshard.device.base.Device`.

    bf16_product: MKL's, see `mpshard.device.mkl`; None: products are NumPy's, in the arrays' own type.
    """

    bf16_product: Callable[..., None] | None = None
    epilogues: Epilogues | None = None

    def matmul(
        self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, accumulate: bool = False,
        bias: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        out = self._product(a, b, out, accumulate)
        if bias is not None:
            self.add_bias(out, bias)
        return out

    def _product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None, accumulate: bool) -> np.ndarray:
        m, n = a.shape[0], b.shape[1]
        if out is None:
            out = self.empty((m, n), a.dtype)
        if self.bf16_product is not None and a.dtype == np.float32:
            mkl.matmul(self.bf16_product, self, a, b, out, accumulate)
            return out
        if not accumulate:
            return np.matmul(a, b, out=out)
        row_bytes = n * out.itemsize
        product = self.empty((block_rows(m, row_bytes, PRODUCT_BYTES), n), out.dtype)
        for block in blocks(m, row_bytes, PRODUCT_BYTES):
            part = np.matmul(a[block], b, out=product[: block.stop - block.start])
            out[block] += part
        return out

    def add_bias(self, y: np.ndarray, bias: np.ndarray) -> None:
        y += bias

    def add(self, out: np.ndarray, x: np.ndarray) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # gradients that are not finite are looked for in their norm
            out += x

    def column_sum(self, dy: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        total = np.zeros_like(out)
        ones = np.ones(block_rows(len(dy), dy.shape[1] * dy.itemsize), dy.dtype)
        for block in blocks(len(dy), dy.shape[1] * dy.itemsize):
            total += ones[: block.stop - block.start] @ dy[block]
        np.add(out, total, out=out) if accumulate else np.copyto(out, total)

