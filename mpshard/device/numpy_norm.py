"""Layer norm and RMS norm, forward and backward, block by block.

Sums over a row or a column are products with a vector: BLAS reads an operand once at full speed, where
`np.sum` over the last axis takes twice as long.
"""

from __future__ import annotations

import numpy as np

from mpshard.device.numpy_memory import NumpyMemory, block_rows, blocks, rows_of


class NormKernels(NumpyMemory):
    """The normalisation part of `mpshard.device.base.Device`."""

    def layer_norm(
        self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        x2, d = rows_of(x), x.shape[-1]
        y = self.empty(x.shape, x.dtype)
        y2 = rows_of(y)
        stats = self.empty((2, len(x2)), x.dtype)
        average = np.full(d, 1 / d, x.dtype)
        for block in blocks(len(x2), d * x.itemsize):
            mean, inverse, out = stats[0, block], stats[1, block], y2[block]
            np.matmul(x2[block], average, out=mean)
            np.subtract(x2[block], mean[:, None], out=out)
            np.vecdot(out, out, out=inverse)
            _inverse_root(inverse, d, eps)
            out *= inverse[:, None]
            out *= weight
            out += bias
        return y, stats

    def layer_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, dbias: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        # With xhat = (x - mean) / std and g = dy * weight:  dx = (g - mean(g) - xhat * mean(g * xhat)) / std
        dy2, x2, d = rows_of(dy), rows_of(x), x.shape[-1]
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        out2 = rows_of(out)
        step = block_rows(len(x2), d * x.itemsize)
        xhat_all, product_all = self.empty((2, step, d), x.dtype)
        weight_mean = weight / d
        ones = np.ones(step, x.dtype)
        columns = _Columns(d, x.dtype)
        for block in blocks(len(x2), d * x.itemsize):
            g, rows = dy2[block], block.stop - block.start
            xhat, product = xhat_all[:rows], product_all[:rows]
            inverse = stats[1, block, None]
            np.subtract(x2[block], stats[0, block, None], out=xhat)
            xhat *= inverse
            np.multiply(g, xhat, out=product)
            if dweight is not None:
                columns.weight += ones[:rows] @ product
            if dbias is not None:
                columns.bias += ones[:rows] @ g
            xhat *= (product @ weight_mean)[:, None]
            np.multiply(g, weight, out=product)
            product -= (g @ weight_mean)[:, None]
            product -= xhat
            _write(product, inverse, out2[block], add=dx is not None)
        columns.store(dweight, dbias, accumulate)
        return out

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        x2, d = rows_of(x), x.shape[-1]
        y = self.empty(x.shape, x.dtype)
        y2 = rows_of(y)
        stats = self.empty(len(x2), x.dtype)
        for block in blocks(len(x2), d * x.itemsize):
            np.vecdot(x2[block], x2[block], out=stats[block])
            _inverse_root(stats[block], d, eps)
            np.multiply(x2[block], stats[block, None], out=y2[block])
            y2[block] *= weight
        return y, stats

    def rms_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        # With xhat = x / rms and g = dy * weight:  dx = (g - xhat * mean(g * xhat)) / rms
        dy2, x2, d = rows_of(dy), rows_of(x), x.shape[-1]
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        out2 = rows_of(out)
        step = block_rows(len(x2), d * x.itemsize)
        xhat_all, product_all = self.empty((2, step, d), x.dtype)
        weight_mean = weight / d
        ones = np.ones(step, x.dtype)
        columns = _Columns(d, x.dtype)
        for block in blocks(len(x2), d * x.itemsize):
            g, rows = dy2[block], block.stop - block.start
            xhat, product = xhat_all[:rows], product_all[:rows]
            inverse = stats[block, None]
            np.multiply(x2[block], inverse, out=xhat)
            np.multiply(g, xhat, out=product)
            if dweight is not None:
                columns.weight += ones[:rows] @ product
            xhat *= (product @ weight_mean)[:, None]
            np.multiply(g, weight, out=product)
            product -= xhat
            _write(product, inverse, out2[block], add=dx is not None)
        columns.store(dweight, None, accumulate)
        return out


class _Columns:
    """Column sums of all blocks, kept apart until the end: the target is then touched once."""

    def __init__(self, d: int, dtype: np.dtype) -> None:
        self.weight, self.bias = np.zeros((2, d), dtype)

    def store(self, dweight: np.ndarray | None, dbias: np.ndarray | None, accumulate: bool) -> None:
        for total, target in ((self.weight, dweight), (self.bias, dbias)):
            if target is not None:
                np.add(target, total, out=target) if accumulate else np.copyto(target, total)


def _inverse_root(squares: np.ndarray, d: int, eps: float) -> None:
    """Sums of squares of rows of d elements -> 1 / sqrt(mean square + eps), in place."""
    squares *= 1 / d
    squares += eps
    np.sqrt(squares, out=squares)
    np.divide(1, squares, out=squares)


def _write(value: np.ndarray, factor: np.ndarray, out: np.ndarray, add: bool) -> None:
    """out = or += value * factor."""
    if add:
        value *= factor
        out += value
    else:
        np.multiply(value, factor, out=out)
