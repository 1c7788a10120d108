"""Causal attention with grouped key/value heads, block by block: no t x t matrix, keys and values never repeated.

Note on layout. The g = h / k query heads that read one key/value head are folded into the rows of the query
block: row = position * g + head in group. A product then serves the whole group, and any range of positions is a
range of rows. Several key/value heads are taken at once (the leading axis of every scratch array), so that short
sequences do not pay for NumPy calls; np.matmul hands each strided head to BLAS without a copy.

Note on the row maximum. Softmax subtracts each row's maximum so that exp does not overflow. Subtracting along rows
costs as much as a product here. Scores within +-SAFE need it for nothing: exp(40) summed over any t, and exp(-40), are
ordinary numbers, and the maximum cancels exactly. So each block of scores is looked at (two passes), and only a
block that leaves this range takes the general way, the running maximum of the paper's online softmax. Backward knows
the range from lse, and exp(-lse) scales the rows of dy instead of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpshard.device.numpy_memory import NumpyMemory

SAFE = 40.0  # scores within +-SAFE are exponentiated as they are
QUERIES = 64  # positions of a block on the diagonal: fewer waste less above it, more make better products
SCORE_BYTES = 256 << 10  # of one block of scores


class AttentionKernels(NumpyMemory):
    """The attention part of `mpshard.device.base.Device` (`rotary` is with the embeddings)."""

    def attention(
        self, qkv: np.ndarray, heads: int, kv_heads: int, scale: float, segments: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        b, t, width = qkv.shape
        g, e = heads // kv_heads, width // (heads + 2 * kv_heads)
        y, lse = self.empty((b, t, heads * e), qkv.dtype), self.empty((b, heads, t), qkv.dtype)
        plan = _Plan(t, g, kv_heads, qkv.dtype)
        scores = self.empty(plan.score_size, qkv.dtype)
        rows_all, sums_all, parts_all = self.empty((3, plan.heads * plan.queries * g * e), qkv.dtype)
        for i, chunk in plan.chunks(b):
            q, k, v = _split(qkv[i], kv_heads, g, e, chunk)
            y_heads = y[i].reshape(t, kv_heads, g, e)[:, chunk].transpose(1, 0, 2, 3)
            lse_heads = lse[i].reshape(kv_heads, g, t)[chunk]
            c = len(k)
            for q0, q1 in plan.diagonal():
                rows = (q1 - q0) * g
                shape = (c, rows, e)
                queries, total, part = _shaped(rows_all, shape), _shaped(sums_all, shape), _shaped(parts_all, shape)
                np.multiply(q[:, q0:q1], scale, out=queries.reshape(c, q1 - q0, g, e))
                maximum, weight = None, None
                for k0, k1 in [(q0, q1), *plan.ranges(0, q0)]:
                    hidden = None if segments is None else _hidden(segments[i], q0, q1, k0, k1, g)
                    if hidden is ALL:
                        continue
                    s = np.matmul(queries, k[:, k0:k1].transpose(0, 2, 1), out=_shaped(scores, (c, rows, k1 - k0)))
                    safe = maximum is None and s.max() < SAFE and s.min() > -SAFE
                    if k0 == q0:
                        s += plan.mask[:rows, : k1 - k0]
                    if hidden is not None:
                        np.copyto(s, -np.inf, where=hidden)
                    if not safe:
                        maximum = _shift(s, maximum, weight, total)
                    np.exp(s, out=s)
                    exp_sum = s @ plan.ones[: k1 - k0]
                    if weight is None:
                        weight = exp_sum
                        np.matmul(s, v[:, k0:k1], out=total)
                    else:
                        weight += exp_sum
                        total += np.matmul(s, v[:, k0:k1], out=part)
                total /= weight[..., None]
                y_heads[:, q0:q1] = total.reshape(c, q1 - q0, g, e)
                np.log(weight, out=weight)
                if maximum is not None:
                    weight += maximum
                lse_heads[:, :, q0:q1] = weight.reshape(c, q1 - q0, g).transpose(0, 2, 1)
        return y, lse

    def attention_backward(
        self, dy: np.ndarray, qkv: np.ndarray, y: np.ndarray, lse: np.ndarray, heads: int, kv_heads: int, scale: float,
        segments: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        # P = exp(S - lse), D = row sums of dy * y:
        # dV = P' dy,  dS = P * (dy V' - D),  dQ = scale dS K,  dK = scale dS' Q.
        # D is subtracted by the product: dy gets a last column -D and V one of ones.
        b, t, width = qkv.shape
        g, e = heads // kv_heads, width // (heads + 2 * kv_heads)
        dqkv = self.empty(qkv.shape, qkv.dtype)
        plan = _Plan(t, g, kv_heads, qkv.dtype)
        scores, dscores = self.empty((2, plan.score_size), qkv.dtype)
        size = plan.heads * t * g * e
        queries_all, dq_all, parts_all = self.empty((3, size), qkv.dtype)
        dy_all = self.empty(size + plan.heads * t * g, qkv.dtype)
        v_all = self.empty(plan.heads * t * (e + 1), qkv.dtype)
        dk_all, dv_all = self.empty((2, plan.heads * plan.queries * e), qkv.dtype)
        for i, chunk in plan.chunks(b):
            q, k, v = _split(qkv[i], kv_heads, g, e, chunk)
            dq_out, dk_out, dv_out = _split(dqkv[i], kv_heads, g, e, chunk)
            c = len(k)
            shape = (c, t * g, e)
            queries, dq = _shaped(queries_all, shape), _shaped(dq_all, shape)
            dyw, vw = _shaped(dy_all, (c, t * g, e + 1)), _shaped(v_all, (c, t, e + 1))
            np.multiply(q, scale, out=queries.reshape(c, t, g, e))
            vw[..., :e], vw[..., e] = v, 1
            norm = np.ascontiguousarray(lse[i].reshape(kv_heads, g, t)[chunk].transpose(0, 2, 1)).reshape(c, t * g)
            safe = norm.max(initial=-SAFE) < SAFE and norm.min(initial=SAFE) > -SAFE
            self._weigh_dy(dy[i], y[i], norm if safe else None, chunk, _shaped(parts_all, shape), dyw)
            if segments is not None:
                dq.fill(0)
            for k0, k1 in plan.diagonal():
                keys, values = k[:, k0:k1], vw[:, k0:k1]
                dk, dv = _shaped(dk_all, keys.shape), _shaped(dv_all, keys.shape)
                for q0, q1 in [(k0, k1), *plan.ranges(k1, t)]:
                    hidden = None if segments is None else _hidden(segments[i], q0, q1, k0, k1, g)
                    if hidden is ALL:
                        continue
                    rows = slice(q0 * g, q1 * g)
                    shape = (c, (q1 - q0) * g, k1 - k0)
                    s = np.matmul(queries[:, rows], keys.transpose(0, 2, 1), out=_shaped(scores, shape))
                    if k0 == q0:
                        s += plan.mask[: shape[1], : shape[2]]
                    if hidden is not None:
                        np.copyto(s, -np.inf, where=hidden)
                    if not safe:
                        s -= norm[:, rows, None]
                    np.exp(s, out=s)
                    ds = np.matmul(dyw[:, rows], values.transpose(0, 2, 1), out=_shaped(dscores, shape))
                    ds *= s
                    _product(s.transpose(0, 2, 1), dyw[:, rows, :e], dv, parts_all, add=q0 != k0)
                    _product(ds.transpose(0, 2, 1), queries[:, rows], dk, parts_all, add=q0 != k0)
                    _product(ds, keys, dq[:, rows], parts_all, add=k0 != 0 or segments is not None)
                dk_out[:, k0:k1], dv_out[:, k0:k1] = dk, dv
            np.multiply(dq.reshape(c, t, g, e), scale, out=dq_out)
        return dqkv

    @staticmethod
    def _weigh_dy(
        dy: np.ndarray, y: np.ndarray, norm: np.ndarray | None, chunk: slice, scratch: np.ndarray, out: np.ndarray
    ) -> None:
        """[dy, -D] of one sequence's chunk of heads into out (c, t g, e + 1), rows times exp(-norm) (None: 1)."""
        c, rows, e = scratch.shape
        t = len(dy)
        view = (t, -1, rows // max(t, 1), e)
        folded = (c, *view[:1], view[2], e)
        dy, y = (a.reshape(view)[:, chunk].transpose(1, 0, 2, 3) for a in (dy, y))
        np.multiply(dy, y, out=scratch.reshape(folded))
        np.matmul(scratch, np.full(e, -1, scratch.dtype), out=out[..., e])
        if norm is None:
            out[..., :e].reshape(folded, copy=False)[:] = dy
        else:
            weight = np.exp(-norm)
            out[..., e] *= weight
            np.multiply(dy, weight.reshape(folded[:3])[..., None], out=out[..., :e].reshape(folded, copy=False))


ALL = np.True_  # what `_hidden` says of a block in which no query sees a key


class _Plan:
    """How a (t, t) triangle is cut, and constants that every block shares."""

    def __init__(self, t: int, g: int, kv_heads: int, dtype: np.dtype) -> None:
        self.t = t
        self.queries = max(1, min(QUERIES, t))
        budget = SCORE_BYTES // dtype.itemsize
        self.heads = max(1, min(kv_heads, budget // (self.queries * g * self.queries)))
        self.step = max(1, budget // (self.queries * g * self.heads * self.queries)) * self.queries
        self.score_size = self.heads * self.queries * g * min(self.step, max(t, 1))
        self.kv_heads = kv_heads
        positions = np.arange(self.queries)
        mask = np.where(positions > positions[:, None], -np.inf, 0).astype(dtype)
        self.mask = np.repeat(mask, g, axis=0)  # added to the scores of a block on the diagonal
        self.ones = np.ones(self.step, dtype)

    def chunks(self, b: int) -> Iterator[tuple[int, slice]]:
        """(sequence, range of key/value heads) of each piece of work."""
        for i in range(b):
            for start in range(0, self.kv_heads, self.heads):
                yield i, slice(start, min(start + self.heads, self.kv_heads))

    def diagonal(self) -> Iterator[tuple[int, int]]:
        return ((start, min(start + self.queries, self.t)) for start in range(0, self.t, self.queries))

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Positions start to stop in pieces of at most `step`."""
        return ((first, min(first + self.step, stop)) for first in range(start, stop, self.step))


def _split(qkv: np.ndarray, kv_heads: int, g: int, e: int, chunk: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of one sequence (t, (h + 2k) e): queries (c, t, g, e), keys and values (c, t, e)."""
    t, h = len(qkv), kv_heads * g
    q = qkv[:, : h * e].reshape(t, kv_heads, g, e)[:, chunk].transpose(1, 0, 2, 3)
    kv = qkv[:, h * e :].reshape(t, 2, kv_heads, e)[:, :, chunk].transpose(1, 2, 0, 3)
    return q, kv[0], kv[1]


def _shaped(buffer: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The head of a flat buffer as a contiguous array."""
    size = 1
    for extent in shape:
        size *= extent
    return buffer[:size].reshape(shape)


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray, scratch: np.ndarray, add: bool) -> None:
    """out = or += a @ b."""
    if add:
        out += np.matmul(a, b, out=_shaped(scratch, out.shape))
    else:
        np.matmul(a, b, out=out)


def _shift(s: np.ndarray, maximum: np.ndarray | None, weight: np.ndarray | None, total: np.ndarray) -> np.ndarray:
    """Subtract the running row maximum from s, rescale what was summed under the old one; returns the new maximum."""
    top = s.max(axis=-1)
    if weight is not None:
        old = np.zeros_like(top) if maximum is None else maximum
        np.maximum(top, old, out=top)
        factor = np.exp(old - top)
        weight *= factor
        total *= factor[..., None]
    s -= top[..., None]
    return top


def _hidden(segments: np.ndarray, q0: int, q1: int, k0: int, k1: int, g: int) -> np.ndarray | None:
    """Which (row, key) pairs lie in different segments; None: no pair, ALL: every pair, as far as cheaply seen."""
    q, k = segments[q0:q1], segments[k0:k1]
    q_low, q_high, k_low, k_high = q.min(), q.max(), k.min(), k.max()
    if q_low > k_high or q_high < k_low:
        return ALL
    if q_low == q_high == k_low == k_high:
        return None
    return np.repeat(q, g)[:, None] != k
