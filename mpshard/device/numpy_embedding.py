"""Embedding rows and positions, forward and backward, and rotary positions."""

from __future__ import annotations

import numpy as np

from mpshard.device.numpy_memory import NumpyMemory, block_rows, blocks, rows_of


class EmbeddingKernels(NumpyMemory):
    """The embedding part of `mpshard.device.base.Device`, and `rotary`."""

    def embedding(self, ids: np.ndarray, table: np.ndarray) -> np.ndarray:
        out = self.empty((*ids.shape, table.shape[1]), table.dtype)
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= len(table):
                raise IndexError(f"token ids from {low} to {high} do not fit a table of {len(table)} rows")
            # mode="raise" would make NumPy gather into a second buffer first
            np.take(table, ids, axis=0, out=out, mode="clip")
        return out

    def add_positions(self, x: np.ndarray, positions: np.ndarray) -> None:
        t = x.shape[1]
        for block in blocks(t, x.shape[2] * x.itemsize):
            for sequence in x:
                sequence[block] += positions[block]

    def embedding_backward(self, dy: np.ndarray, ids: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        # Sorted stably by id, a row of `out` is the sum of consecutive rows: one product with a matrix of
        # ones and zeros sums a block of them. (add.reduceat does the same 5 times slower.)
        if not accumulate:
            out.fill(0)
        dy2, order = rows_of(dy), np.argsort(ids, axis=None, kind="stable")
        sorted_ids = ids.reshape(-1)[order]
        step = block_rows(len(order), dy2.shape[1] * dy2.itemsize)
        rows = self.empty((step, dy2.shape[1]), dy.dtype)
        select = self.empty(step * step, dy.dtype)
        for block in blocks(len(order), dy2.shape[1] * dy2.itemsize):
            targets, position = np.unique(sorted_ids[block], return_inverse=True)
            count = block.stop - block.start
            matrix = select[: len(targets) * count].reshape(len(targets), count)
            matrix.fill(0)
            matrix[position, np.arange(count)] = 1
            np.take(dy2, order[block], axis=0, out=rows[:count], mode="clip")
            out[targets] += matrix @ rows[:count]

    def positions_backward(self, dy: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        b, t, d = dy.shape
        for block in blocks(t, d * dy.itemsize):
            target = out[block]
            if b and not accumulate:
                np.copyto(target, dy[0, block])
            for sequence in dy[0 if accumulate else 1 :]:
                target += sequence[block]
        if not accumulate:
            out[t if b else 0 :].fill(0)

    def rotary(
        self, qkv: np.ndarray, heads: int, kv_heads: int, cos: np.ndarray, sin: np.ndarray, inverse: bool = False
    ) -> None:
        # Per head [first, second] -> [first cos - second sin, second cos + first sin]. Halves of a head are runs of 32
        # elements or so, and NumPy's cost is per run; so whole rows are taken, a partner being the row shifted by
        # half a head, and tables spread over the row pick which shift counts where: 0 where it enters another head.
        b, t, width = qkv.shape
        half = cos.shape[-1]
        turned = (heads + kv_heads) * 2 * half  # the query and key heads; value heads stay
        row_bytes = turned * qkv.itemsize
        step = block_rows(t, row_bytes)
        scratch = self.empty((5, step, turned), qkv.dtype)
        shared = cos.ndim == 2
        for block in blocks(t, row_bytes):
            c, ahead, behind, first, second = scratch[:, : block.stop - block.start]
            for i in range(b):
                if i == 0 or not shared:
                    rows = block if shared else (i, block)
                    _spread(cos[rows], sin[rows], inverse, c, ahead, behind)
                z = qkv[i, block, :turned]
                np.multiply(z[:, half:], ahead[:, :-half], out=first[:, :-half])
                np.multiply(z[:, :-half], behind[:, half:], out=second[:, half:])
                z *= c
                z[:, :-half] += first[:, :-half]
                z[:, half:] += second[:, half:]


def _spread(
    cos: np.ndarray, sin: np.ndarray, inverse: bool, c: np.ndarray, ahead: np.ndarray, behind: np.ndarray
) -> None:
    """Tables (rows, e/2) -> factors of a row's own elements, of those half a head ahead and of those behind."""
    rows, half = cos.shape
    view = (rows, -1, 2, half)
    c.reshape(view)[:] = cos[:, None, None]
    ahead, behind = ahead.reshape(view), behind.reshape(view)
    sign = -1 if inverse else 1
    np.multiply(sin[:, None], -sign, out=ahead[:, :, 0])
    ahead[:, :, 1] = 0
    np.multiply(sin[:, None], sign, out=behind[:, :, 1])
    behind[:, :, 0] = 0
