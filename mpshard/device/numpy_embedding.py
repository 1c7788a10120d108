"""Embedding rows and positions, forward and backward, and rotary positions."""

from __future__ import annotations

import numpy as np

from mpshard.device.numpy_memory import NumpyMemory, block_rows, blocks, rows_of

ROUNDS = 16  # of `embedding_backward`: rows of one id that are added one by one


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
        # Sorted stably, an id's rows lie together. Round r adds the r-th row of every id that has one: targets are then
        # distinct and NumPy adds many rows at a time. The few ids with many rows get the rest as sums of their own.
        if not accumulate:
            out.fill(0)
        dy2, order = rows_of(dy), np.argsort(ids, axis=None, kind="stable")
        targets, starts, counts = np.unique(ids.reshape(-1)[order], return_index=True, return_counts=True)
        row_bytes = dy2.shape[1] * dy2.itemsize
        added, old = self.empty((2, block_rows(len(order), row_bytes), dy2.shape[1]), dy.dtype)
        for r in range(min(ROUNDS, counts.max(initial=0))):
            chosen = np.flatnonzero(counts > r)
            for block in blocks(len(chosen), row_bytes):
                some = chosen[block]
                rows = np.take(dy2, order[starts[some] + r], axis=0, out=added[: len(some)], mode="clip")
                rows += np.take(out, targets[some], axis=0, out=old[: len(some)], mode="clip")
                out[targets[some]] = rows
        for k in np.flatnonzero(counts > ROUNDS):
            rest = order[starts[k] + ROUNDS : starts[k] + counts[k]]
            for block in blocks(len(rest), row_bytes):
                rows = np.take(dy2, rest[block], axis=0, out=added[: block.stop - block.start], mode="clip")
                out[targets[k]] += np.ones(len(rows), rows.dtype) @ rows

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
        # elements or so and NumPy's arithmetic costs extra per run, its copying little: so one copy swaps the halves,
        # and with tables spread over all heads the arithmetic goes over whole rows.
        b, t, _ = qkv.shape
        half = cos.shape[-1]
        width = (heads + kv_heads) * 2 * half  # query and key heads; value heads stay
        row_bytes = width * qkv.itemsize
        spread_cos, spread_sin, swapped, product = self.empty((4, block_rows(t, row_bytes), width), qkv.dtype)
        shared = cos.ndim == 2
        for block in blocks(t, row_bytes):
            rows = slice(0, block.stop - block.start)
            c, s, other, turned = spread_cos[rows], spread_sin[rows], swapped[rows], product[rows]
            for i in range(b):
                if i == 0 or not shared:
                    angles = block if shared else (i, block)
                    _halves(c, half)[:] = cos[angles][:, None, None]
                    _halves(s, half)[:] = sin[angles][:, None, None]
                    _halves(s, half)[:, :, 1 if inverse else 0] *= -1
                z = qkv[i, block, :width]
                _halves(other, half)[:] = _halves(z, half)[:, :, ::-1]
                other *= s
                np.multiply(z, c, out=turned)
                np.add(turned, other, out=z)


def _halves(rows: np.ndarray, half: int) -> np.ndarray:
    """(rows, heads * e) as a view (rows, heads, 2, e/2)."""
    return rows.reshape(len(rows), -1, 2, half, copy=False)
