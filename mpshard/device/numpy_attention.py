"""Causal attention with grouped key/value heads, block by block: no t x t matrix, keys and values never repeated.

Note on layout. The g = h / k query heads that read one key/value head are folded into the rows of the query
block: row = position * g + head in group. A product then serves the whole group, and any range of positions is a
range of rows. Several heads (and sequences, if short) are taken at once, as the leading axes of every scratch array,
to make few NumPy calls of the work; np.matmul hands each strided head to BLAS without a copy.

Note on the row maximum. Softmax subtracts each row's maximum so that exp does not overflow, and NumPy's passes
along short rows cost as much as a product here. While scores stay moderate, exp of them as they are is just as
exact, since the maximum cancels; whether they did shows in the sums alone. So each block of queries is done without,
and once more with the running maximum of the paper's online softmax where a sum left [SMALL, LARGE]. Backward
subtracts the known lse inside the product that makes the scores: queries get a last column -lse, keys one of ones;
likewise for dP - D.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from mpshard.device.numpy_memory import NumpyMemory

QUERIES = 64  # positions of a block on the diagonal: fewer waste less above it, more make better products
SCORE_BYTES = 512 << 10  # of one block of scores
SMALL, LARGE = 1e-17, 1e26  # about exp(-40), below which lost exp(-87) would count; exp(60), far from float32's end


class AttentionKernels(NumpyMemory):
    """The attention part of `mpshard.device.base.Device` (`rotary` is with the embeddings)."""

    def attention(
        self, qkv: np.ndarray, heads: int, kv_heads: int, scale: float, segments: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        b, t, width = qkv.shape
        g, e = heads // kv_heads, width // (heads + 2 * kv_heads)
        y, lse = self.empty((b, t, heads * e), qkv.dtype), self.empty((b, heads, t), qkv.dtype)
        plan = _plan(b if segments is None else 1, t, kv_heads, g, qkv.dtype, QUERIES, SCORE_BYTES)
        size = plan.sequences * plan.heads * plan.queries * g * e
        scores, queries_all, total_all, part_all, spread_all = self.scratch(qkv.dtype, plan.score_size, *[size] * 4)
        for i, chunk in plan.chunks(b):
            q, k, v = _split(qkv[i], kv_heads, g, e, chunk)
            y_out = y[i].reshape(-1, t, kv_heads, g, e)[:, :, chunk].transpose(0, 2, 1, 3, 4)
            lse_out = lse[i].reshape(-1, kv_heads, g, t)[:, chunk]
            for q0, q1 in plan.diagonal():
                queries = np.multiply(q[:, :, q0:q1], scale, out=_folded(queries_all, q[:, :, q0:q1]))
                queries = queries.reshape(*k.shape[:2], -1, e, copy=False)
                diagonal = plan.mask[: q1 - q0, : (q1 - q0) * g]
                pieces = [(k0, k1, diagonal if k1 == q1 else None) for k0, k1 in plan.ranges_down(q1)]
                if segments is not None:
                    pieces = _with_segments(pieces, segments[i][0], q0, q1, g)
                total, part, spread = (_folded(a, q[:, :, q0:q1]) for a in (total_all, part_all, spread_all))
                with np.errstate(over="ignore", invalid="ignore"):
                    weight, maximum = _attend(queries, k, v, pieces, scores, total, part, shifted=False)
                if not (weight.min() > SMALL and weight.max() < LARGE):
                    weight, maximum = _attend(queries, k, v, pieces, scores, total, part, shifted=True)
                by_position = total.shape[:4]
                spread[:] = (1 / weight).reshape(by_position)[..., None]  # long rows again, where NumPy is fast
                np.multiply(total, spread, out=y_out[:, :, q0:q1])
                np.log(weight, out=weight)
                weight += maximum
                lse_out[..., q0:q1] = weight.reshape(by_position).transpose(0, 1, 3, 2)
        return y, lse

    def attention_backward(
        self, dy: np.ndarray, qkv: np.ndarray, y: np.ndarray, lse: np.ndarray, heads: int, kv_heads: int, scale: float,
        segments: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        # P = exp(S - lse), D = row sums of dy * y:
        # dV = P' dy,  dS = P * (dy V' - D),  dQ = scale dS K,  dK = scale dS' Q.
        b, t, width = qkv.shape
        g, e = heads // kv_heads, width // (heads + 2 * kv_heads)
        dqkv = self.empty(qkv.shape, qkv.dtype)
        plan = _plan(b if segments is None else 1, t, kv_heads, g, qkv.dtype, QUERIES, SCORE_BYTES)
        heads_here = plan.sequences * plan.heads
        size, key_block = heads_here * t, heads_here * plan.queries * e
        scores, dscores, q_all, dy_all, k_all, v_all, dq_all, part_all, dk_all, dv_all = self.scratch(
            qkv.dtype, *[plan.score_size] * 2, *[size * g * (e + 1)] * 2, *[size * (e + 1)] * 2, *[size * g * e] * 2,
            *[key_block] * 2,
        )  # fmt: skip
        minus = np.full(e, -1, qkv.dtype)
        for i, chunk in plan.chunks(b):
            q, k, v = _split(qkv[i], kv_heads, g, e, chunk)
            dq_out, dk_out, dv_out = _split(dqkv[i], kv_heads, g, e, chunk)
            dy_in, y_in = (a[i].reshape(-1, t, kv_heads, g, e)[:, :, chunk].transpose(0, 2, 1, 3, 4) for a in (dy, y))
            norm = lse[i].reshape(-1, kv_heads, g, t)[:, chunk].transpose(0, 1, 3, 2)
            product = np.multiply(dy_in, y_in, out=_folded(part_all, q))
            queries = _with_column(q_all, q, norm * (-1 / scale))
            queries *= scale
            gradients = _with_column(dy_all, dy_in, product @ minus)
            keys, values = _with_column(k_all, k, 1), _with_column(v_all, v, 1)
            dq = _shaped(dq_all, (*k.shape[:2], t * g, e))
            if segments is not None:
                dq.fill(0)
            for k0, k1 in plan.diagonal():
                key, value = keys[:, :, k0:k1], values[:, :, k0:k1]
                dk, dv = dk_out[:, :, k0:k1], dv_out[:, :, k0:k1]
                if k0 + plan.step < t:  # several products are summed: in the cache
                    dk, dv = (_shaped(a, dk.shape) for a in (dk_all, dv_all))
                for q0, q1 in plan.ranges_up(k0):
                    mask = None if segments is None else _segment_mask(segments[i][0], q0, q1, k0, k1, g)
                    if mask is ALL:
                        continue
                    rows = slice(q0 * g, q1 * g)
                    query, gradient = queries[:, :, rows], gradients[:, :, rows]
                    shape = (*query.shape[:3], k1 - k0)
                    s = np.matmul(query, key.swapaxes(2, 3), out=_shaped(scores, shape))
                    if q0 == k0:
                        s[:, :, : (k1 - k0) * g] += plan.mask[: k1 - k0, : (k1 - k0) * g].T
                    if mask is not None:
                        s += mask.T
                    np.exp(s, out=s)
                    ds = np.matmul(gradient, value.swapaxes(2, 3), out=_shaped(dscores, shape))
                    ds *= s
                    _product(s.swapaxes(2, 3), gradient[..., :e], dv, part_all, add=q0 != k0)
                    _product(ds.swapaxes(2, 3), query[..., :e], dk, part_all, add=q0 != k0)
                    _product(ds, key[..., :e], dq[:, :, rows], part_all, add=k0 != 0)
                if k0 + plan.step < t:
                    dk_out[:, :, k0:k1], dv_out[:, :, k0:k1] = dk, dv
            dq *= scale
            dq_out[:] = dq.reshape(q.shape)
        return dqkv


ALL = np.empty(0)  # what `_segment_mask` says of a block in which no query sees a key


class _Plan:
    """How a (t, t) triangle is cut, and the mask that every block on the diagonal shares."""

    def __init__(
        self, b: int, t: int, kv_heads: int, g: int, dtype: np.dtype, queries: int, score_bytes: int
    ) -> None:
        budget = score_bytes // dtype.itemsize
        self.t, self.kv_heads = t, kv_heads
        self.queries = max(1, min(queries, t))
        width = self.queries * g
        self.heads = max(1, min(kv_heads, budget // (width * self.queries)))
        self.step = max(1, min(budget // (width * self.heads), t) // self.queries) * self.queries
        self.sequences = 1
        if self.heads == kv_heads and self.step >= t > 0:
            self.sequences = max(1, min(b, budget // (width * self.heads * t)))
        self.score_size = self.sequences * self.heads * width * self.step
        positions = np.arange(self.queries)
        self.mask = np.where(positions[:, None] > positions.repeat(g), -np.inf, 0).astype(dtype)  # (keys, rows)

    def chunks(self, b: int) -> Iterator[tuple[slice, slice]]:
        """(sequences, key/value heads) of each piece of work."""
        for first in range(0, b, self.sequences):
            for start in range(0, self.kv_heads, self.heads):
                yield slice(first, first + self.sequences), slice(start, start + self.heads)

    def diagonal(self) -> Iterator[tuple[int, int]]:
        return ((start, min(start + self.queries, self.t)) for start in range(0, self.t, self.queries))

    def ranges_down(self, stop: int) -> Iterator[tuple[int, int]]:
        """Positions before `stop` in pieces of at most `step`, the last first."""
        return ((max(0, last - self.step), last) for last in range(stop, 0, -self.step))

    def ranges_up(self, start: int) -> Iterator[tuple[int, int]]:
        """Positions from `start` on in pieces of at most `step`."""
        return ((first, min(first + self.step, self.t)) for first in range(start, self.t, self.step))


_plan = lru_cache(maxsize=64)(_Plan)  # short sequences would feel the microseconds it takes


def _split(qkv: np.ndarray, kv_heads: int, g: int, e: int, chunk: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of sequences (s, t, (h + 2k) e): queries (s, c, t, g, e), keys and values (s, c, t, e)."""
    s, t, h = *qkv.shape[:2], kv_heads * g
    q = qkv[..., : h * e].reshape(s, t, kv_heads, g, e)[:, :, chunk].transpose(0, 2, 1, 3, 4)
    kv = qkv[..., h * e :].reshape(s, t, 2, kv_heads, e)[:, :, :, chunk].transpose(2, 0, 3, 1, 4)
    return q, kv[0], kv[1]


def _shaped(buffer: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The head of a flat buffer as a contiguous array."""
    size = 1
    for extent in shape:
        size *= extent
    return buffer[:size].reshape(shape)


def _folded(buffer: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Scratch shaped (s, c, t, g, e) as `like`, whose axes t and g can be joined without a copy.

    With one query head a group it keeps the order (s, t, c, e) of the activations: NumPy then walks long rows.
    """
    s, c, t, g, e = like.shape
    if g == 1:
        return _shaped(buffer, (s, t, c, 1, e)).transpose(0, 2, 1, 3, 4)
    return _shaped(buffer, like.shape)


def _with_column(buffer: np.ndarray, array: np.ndarray, column: np.ndarray | int) -> np.ndarray:
    """A copy of array (s, c, ..., e) as rows of e + 1 elements (s, c, rows, e + 1), the last one from `column`."""
    e = array.shape[-1]
    out = _shaped(buffer, (*array.shape[:-1], e + 1))
    out[..., :e] = array
    out[..., e] = column
    return out.reshape(*array.shape[:2], -1, e + 1)


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray, scratch: np.ndarray, add: bool) -> None:
    """out = or += a @ b."""
    if add:
        out += np.matmul(a, b, out=_shaped(scratch, out.shape))
    else:
        np.matmul(a, b, out=out)


_Piece = tuple[int, int, np.ndarray | None]  # keys from, to; what to add to the scores (keys, rows) of the last ones


def _attend(
    queries: np.ndarray, k: np.ndarray, v: np.ndarray, pieces: list[_Piece], scores: np.ndarray,
    total: np.ndarray, part: np.ndarray, shifted: bool,
) -> tuple[np.ndarray, np.ndarray | int]:  # fmt: skip
    """For a block of queries (s, c, rows, e), sums over keys of exp(score - maximum), and of that times v into `total`.

    The first piece holds the diagonal. Scores lie transposed, (keys, rows), so that the diagonal is whole rows of
    the block. -> weight and maximum, each (s, c, rows); not `shifted`: the maximum is 0, and weight may be inf.
    """
    *lead, rows, e = queries.shape
    total, part = (a.reshape(*lead, rows, e, copy=False) for a in (total, part))
    weight: np.ndarray | None = None
    maximum: np.ndarray | int = 0
    for k0, k1, mask in pieces:
        s = np.matmul(k[:, :, k0:k1], queries.swapaxes(2, 3), out=_shaped(scores, (*lead, k1 - k0, rows)))
        if mask is not None:
            s[:, :, -len(mask) :] += mask
        if shifted:
            top = s.max(axis=2)
            if weight is not None:
                np.maximum(top, maximum, out=top)
                factor = np.exp(maximum - top)
                weight *= factor
                total *= factor[..., None]
            s -= top[:, :, None]
            maximum = top
        np.exp(s, out=s)
        sums = np.matmul(np.ones(k1 - k0, s.dtype), s)
        if weight is None:
            weight = sums
            np.matmul(s.swapaxes(2, 3), v[:, :, k0:k1], out=total)
        else:
            weight += sums
            total += np.matmul(s.swapaxes(2, 3), v[:, :, k0:k1], out=part)
    assert weight is not None
    return weight, maximum


def _with_segments(pieces: list[_Piece], segments: np.ndarray, q0: int, q1: int, g: int) -> list[_Piece]:
    """The pieces of which something is visible, with masks that hide keys of other segments too."""
    visible = []
    for k0, k1, causal in pieces:
        mask = _segment_mask(segments, q0, q1, k0, k1, g)
        if mask is None:
            visible.append((k0, k1, causal))
        elif mask is not ALL:
            if causal is not None:
                mask[-len(causal) :] += causal
            visible.append((k0, k1, mask))
    return visible


def _segment_mask(segments: np.ndarray, q0: int, q1: int, k0: int, k1: int, g: int) -> np.ndarray | None:
    """(keys, rows) with -inf where segments differ; None: nowhere, ALL: everywhere, as far as is cheaply seen."""
    q, k = segments[q0:q1], segments[k0:k1]
    q_low, q_high, k_low, k_high = q.min(), q.max(), k.min(), k.max()
    if q_low > k_high or q_high < k_low:
        return ALL
    if q_low == q_high == k_low == k_high:
        return None
    return np.where(k[:, None] != q.repeat(g), np.float32(-np.inf), np.float32(0))
