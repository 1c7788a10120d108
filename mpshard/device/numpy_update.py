"""The optimizer's update and the sums over flat arrays."""

from __future__ import annotations

import math

from collections.abc import Sequence

import numpy as np

from mpshard.device.numpy_memory import NumpyMemory, block_rows, blocks, flat


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

    def sum_of_squares(self, x: np.ndarray) -> float:
        x1, total = flat(x), 0.0
        scratch = self.empty(block_rows(x1.size, 8), np.float64)
        for block in blocks(x1.size, 8):
            wide = scratch[: block.stop - block.start]
            np.copyto(wide, x1[block])
            total += float(np.dot(wide, wide))
        return total

    def ordered_sum(self, parts: Sequence[np.ndarray], out: np.ndarray, accumulate: bool) -> None:
        scratch = self.empty(block_rows(out.size, out.itemsize) if accumulate else 0, out.dtype)
        for block in blocks(out.size, out.itemsize):
            total = scratch[: block.stop - block.start] if accumulate else out[block]
            np.copyto(total, parts[0][block])
            for part in parts[1:]:
                np.add(total, part[block], out=total)
            if accumulate:
                out[block] += total
