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
        # With c = x - mean, r = 1 / std, g = dy * weight:
        # dx = r (g - mean(g)) - r^3 c mean(g c),  dweight = r @ (dy c)
        dy2, x2, d = rows_of(dy), rows_of(x), x.shape[-1]
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        out2 = rows_of(out)
        step = block_rows(len(x2), d * x.itemsize)
        centred_all, product_all = self.empty((2, step, d), x.dtype)
        weight_mean = weight / d
        ones = np.ones(step, x.dtype)
        columns = Columns(d, x.dtype)
        for block in blocks(len(x2), d * x.itemsize):
            g, mean, inverse, rows = dy2[block], stats[0, block], stats[1, block], block.stop - block.start
            centred, product = centred_all[:rows], product_all[:rows]
            np.subtract(x2[block], mean[:, None], out=centred)
            np.multiply(g, centred, out=product)
            if dweight is not None:
                columns.weight += inverse @ product
            if dbias is not None:
                columns.bias += ones[:rows] @ g
            centred *= (product @ weight_mean * inverse**3)[:, None]
            np.multiply(g, weight, out=product)
            product -= (g @ weight_mean)[:, None]
            product *= inverse[:, None]
            _subtract(product, centred, out2[block], add=dx is not None)
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
        # With r = 1 / rms and g = dy * weight:  dx = r g - r^3 x mean(g x),  dweight = r @ (dy x)
        dy2, x2, d = rows_of(dy), rows_of(x), x.shape[-1]
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        out2 = rows_of(out)
        step = block_rows(len(x2), d * x.itemsize)
        scaled_all, product_all = self.empty((2, step, d), x.dtype)
        weight_mean = weight / d
        columns = Columns(d, x.dtype)
        for block in blocks(len(x2), d * x.itemsize):
            g, inverse, rows = dy2[block], stats[block], block.stop - block.start
            scaled, product = scaled_all[:rows], product_all[:rows]
            np.multiply(g, x2[block], out=product)
            if dweight is not None:
                columns.weight += inverse @ product
            np.multiply(x2[block], (product @ weight_mean * inverse**3)[:, None], out=scaled)
            np.multiply(g, weight, out=product)
            product *= inverse[:, None]
            _subtract(product, scaled, out2[block], add=dx is not None)
        columns.store(dweight, None, accumulate)
        return out


class Columns:
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


def _subtract(a: np.ndarray, b: np.ndarray, out: np.ndarray, add: bool) -> None:
    """out = or += a - b; `a` may be overwritten."""
    if add:
        a -= b
        out += a
    else:
        np.subtract(a, b, out=out)
