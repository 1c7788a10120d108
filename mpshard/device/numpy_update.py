"""The optimizer's update and the sums over flat arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from mpshard.device.numpy_memory import NumpyMemory, block_rows, blocks, flat
from mpshard.device.numpy_random import random_words

BF16 = np.dtype(ml_dtypes.bfloat16)


class UpdateKernels(NumpyMemory):
    """The optimizer and sums part of `mpshard.device.base.Device`."""

    def adamw(
        self, weight: np.ndarray, gradient: np.ndarray, moment1: np.ndarray, moment2: np.ndarray, *,
        lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, gradient_scale: float,
    ) -> None:  # fmt: skip
        # weight -= lr / c1 * m / (sqrt(v) / sqrt(c2) + eps), with both sides of the fraction times sqrt(c2)
        root = math.sqrt(1 - beta2**step)
        rate = lr * root / (1 - beta1**step)
        arrays = [flat(a) for a in (weight, gradient, moment1, moment2)]
        scratch = self.empty(block_rows(weight.size, weight.itemsize), weight.dtype)
        for block in blocks(weight.size, weight.itemsize):
            w, g, m, v = (a[block] for a in arrays)
            s = scratch[: block.stop - block.start]
            np.multiply(g, (1 - beta1) * gradient_scale, out=s)
            m *= beta1
            m += s
            np.multiply(g, gradient_scale * math.sqrt(1 - beta2), out=s)
            s *= s
            v *= beta2
            v += s
            np.sqrt(v, out=s)
            s += eps * root
            np.divide(m, s, out=s)
            s *= rate
            if weight_decay:
                w *= 1 - lr * weight_decay
            w -= s

    def blend(self, out: np.ndarray, x: np.ndarray, keep: float, share: float) -> None:
        if keep == 0:
            np.multiply(x, share, out=out)
            return
        out1, x1 = flat(out), flat(x)
        scratch = self.empty(block_rows(out.size, out.itemsize), out.dtype)
        for block in blocks(out.size, out.itemsize):
            added = np.multiply(x1[block], share, out=scratch[: block.stop - block.start])
            if keep != 1:
                out1[block] *= keep
            out1[block] += added

    def round_at_random(self, x: np.ndarray, out: np.ndarray, key: tuple[int, int], start: int) -> None:
        bits, words = x.view(np.uint32), out.view(np.uint16)
        rows = block_rows(x.size, 4)
        counter = np.arange(rows, dtype=np.uint32)
        noise, scratch = self.empty((2, rows), np.uint32)
        for block in blocks(x.size, 4):
            count = block.stop - block.start
            random_words(key, start + block.start, counter[:count], noise[:count], scratch[:count])
            noise[:count] >>= 16
            noise[:count] += bits[block]  # infinity stays what it is: its lower 16 bits are zero, nothing is carried
            np.right_shift(noise[:count], 16, out=words[block], casting="unsafe")

    def sum_of_squares(self, x: np.ndarray) -> float:
        # BLAS sums a block in its own precision, to 1e-7; only where float32 has not the range is it done in float64.
        x1, total = flat(x), 0.0
        for block in blocks(x1.size, x1.itemsize):
            with np.errstate(over="ignore"):
                part = float(np.dot(x1[block], x1[block]))
            if x1.dtype != np.float64 and not 1e-30 < part < 1e30:
                wide = x1[block].astype(np.float64)
                part = float(np.dot(wide, wide))
            total += part
        return total

    def ordered_sum(self, parts: Sequence[np.ndarray], out: np.ndarray, accumulate: bool) -> None:
        step = block_rows(out.size, out.itemsize)
        depth = max(1, (len(parts) - 1).bit_length()) + 1
        scratch = self.empty((depth, step), out.dtype)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is looked for in the sum
            for block in blocks(out.size, out.itemsize):
                rows = [row[: block.stop - block.start] for row in scratch]
                if accumulate:
                    out[block] += _tree_sum(parts, block, rows[0], rows[1:])
                else:
                    _tree_sum(parts, block, out[block], rows)

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        if x.dtype == np.float32 and out.dtype == BF16:
            round_to_bf16(self, x, out)
        elif x.dtype == BF16 and out.dtype == np.float32:
            np.left_shift(x.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite, and is looked for
                np.copyto(out, x, casting="unsafe")


def _tree_sum(parts: Sequence[np.ndarray], block: slice, total: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Leave in `total` the sum of a block of all parts, in a balanced binary tree; one row of scratch is used a level."""
    if len(parts) == 1:
        np.copyto(total, parts[0][block], casting="unsafe")
        return total
    half = 1 << (len(parts) - 1).bit_length() - 1
    left = parts[0][block] if half == 1 else _tree_sum(parts[:half], block, total, rows)
    right = parts[half][block] if len(parts) - half == 1 else _tree_sum(parts[half:], block, rows[0], rows[1:])
    return np.add(_widened(left, total), _widened(right, rows[0]), out=total)


def _widened(part: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """`part` in the type of `spare`, and in its place if that is another."""
    if part.dtype == spare.dtype:
        return part
    np.copyto(spare, part, casting="unsafe")
    return spare


def round_to_bf16(memory: NumpyMemory, x: np.ndarray, out: np.ndarray) -> None:
    """The upper 16 bits after adding half of the lower ones' unit, less one bit where that makes a tie even.

    ml_dtypes rounds the same, several times slower. NaN is kept (the addition could carry it to zero).
    """
    bits, words = flat(x).view(np.uint32), flat(out).view(np.uint16)
    scratch = memory.empty((2, block_rows(bits.size, 4)), np.uint32)
    for block in blocks(bits.size, 4):
        source = bits[block]
        odd, total = scratch[:, : source.size]
        np.right_shift(source, 16, out=odd)
        odd &= 1
        np.add(source, 0x7FFF, out=total)
        total += odd
        total >>= 16
        np.copyto(words[block], total, casting="unsafe")
        nan = np.isnan(source.view(np.float32))
        if nan.any():
            words[block][nan] = 0x7FC0
