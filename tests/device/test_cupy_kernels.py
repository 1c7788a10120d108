"""The CuPy device's kernels in every precision against the NumPy device's in float64.

On the stand-in the kernels' own CUDA source runs on the CPU; with `-m gpu` the same tests run on a GPU.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpshard.device.numpy_device import NumpyDevice

DTYPES = [np.dtype(name) for name in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
pytestmark = pytest.mark.gpu
IGNORE = -100
EXACT = NumpyDevice()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


class Pair:
    """Arrays as a GPU has them in some precision, and the same values in float64 on the host."""

    def __init__(self, device, dtype, seed=0):
        self.device, self.dtype, self.random = device, dtype, np.random.default_rng(seed)
        self.wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def make(self, *shape, spread=1.0, dtype=None):
        """(GPU array, float64 array) with equal random values."""
        host = (self.random.standard_normal(shape) * spread).astype(dtype or self.dtype)
        return self.device.from_host(host), host.astype(np.float64)

    def ids(self, high, *shape, ignored=0.0):
        host = self.random.integers(0, high, shape)
        host[self.random.random(shape) < ignored] = IGNORE
        return self.device.from_host(host), host

    def check(self, got, expected, slack=1.0, dtype=None, of=None):
        """Equal within some units of rounding of the largest value (`of`: or of this size)."""
        host = self.device.to_host(got)
        assert host.dtype == (dtype or self.dtype) and host.shape == expected.shape
        unit = float(ml_dtypes.finfo(self.dtype).eps)
        size = max(float(np.abs(expected).max(initial=0.0)), of or 0.0, 1e-3)
        assert_allclose(host.astype(np.float64), expected, rtol=0, atol=4 * slack * unit * size)


@pytest.fixture
def pair(gpu, dtype):
    return Pair(gpu, dtype)


# -- dense -----------------------------------------------------------------------------------
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (0, 3, 2), (3, 0, 2), (5, 7, 3), (1, 9, 4), (6, 1, 5)])
@pytest.mark.parametrize("turn_a", [False, True])
@pytest.mark.parametrize("turn_b", [False, True])
def test_matmul(pair, m, k, n, turn_a, turn_b):
    (a, a64), (b, b64) = pair.make(*((k, m) if turn_a else (m, k))), pair.make(*((n, k) if turn_b else (k, n)))
    a, a64 = (a.T, a64.T) if turn_a else (a, a64)
    b, b64 = (b.T, b64.T) if turn_b else (b, b64)
    pair.check(pair.device.matmul(a, b), a64 @ b64, of=3)
    out, out64 = pair.make(m, n)
    assert pair.device.matmul(a, b, out=out, accumulate=True) is out
    pair.check(out, out64 + a64 @ b64, of=3)
    wide, wide64 = pair.make(m, n, dtype=pair.wide)  # 16-bit factors, float32 sums kept
    pair.device.matmul(a, b, out=wide, accumulate=True)
    pair.check(wide, wide64 + a64 @ b64, slack=1e-2 if pair.dtype.itemsize == 2 else 1, dtype=pair.wide, of=3)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7), (700, 65), (9, 48)])
def test_bias_and_its_gradient(pair, shape):
    (y, y64), (dy, dy64), (bias, bias64) = pair.make(*shape), pair.make(*shape), pair.make(shape[1])
    pair.device.add_bias(y, bias)
    pair.check(y, y64 + bias64)
    for accumulate in (False, True):
        pair.device.column_sum(dy, bias, accumulate)
        bias64 = dy64.sum(0) + (bias64 if accumulate else 0)
        pair.check(bias, bias64, of=1)
        bias64 = pair.device.to_host(bias).astype(np.float64)
    x, x64 = pair.make(*shape)
    pair.device.add(x, dy)
    pair.check(x, x64 + dy64)


@pytest.mark.parametrize("first", [0, 1, 8])
def test_arrays_that_begin_anywhere(pair, first):
    """Wide accesses want 16 bytes: where an array begins elsewhere the kernels take single elements."""
    (x, x64), (y, y64) = pair.make(100), pair.make(100)
    pair.device.add(x[first:], y[first:])
    x64[first:] += y64[first:]
    pair.check(x, x64)
    z, z64 = pair.make(40 + first)
    rows, rows64 = z[first:].reshape(5, 8), z64[first:].reshape(5, 8)
    weight, weight64 = pair.make(8)
    pair.check(pair.device.rms_norm(rows, weight, 1e-5)[0], EXACT.rms_norm(rows64, weight64, 1e-5)[0])


def test_cast(pair):
    x, x64 = pair.make(1000, spread=100)
    for name in DTYPES:
        out = pair.device.empty(1000, name)
        pair.device.cast(x, out)
        assert_array_equal(pair.device.to_host(out), x64.astype(np.float32 if name.itemsize == 2 else name).astype(name))


# -- embedding -------------------------------------------------------------------------------
@pytest.mark.parametrize("b, t, v, d", [(1, 1, 1, 1), (2, 7, 5, 3), (0, 4, 3, 2), (3, 90, 11, 129), (2, 5, 6, 64)])
def test_embedding(pair, b, t, v, d):
    (ids, ids64), (table, table64), (dy, dy64), (out, out64) = pair.ids(v, b, t), pair.make(v, d), pair.make(b, t, d), pair.make(v, d)
    assert_array_equal(pair.device.to_host(pair.device.embedding(ids, table)).astype(np.float64), table64[ids64])
    sums = np.zeros((v, d))
    np.add.at(sums, ids64.reshape(-1), dy64.reshape(-1, d))
    pair.device.embedding_backward(dy, ids, out, accumulate=True)
    pair.check(out, out64 + sums)
    pair.device.embedding_backward(dy, ids, out, accumulate=False)
    pair.check(out, sums)


def test_embedding_of_an_unknown_token_is_nan(pair):
    ids = pair.device.from_host(np.array([[0, 3, -1]]))
    rows = pair.device.to_host(pair.device.embedding(ids, pair.make(3, 2)[0])).astype(np.float64)
    assert np.isfinite(rows[0, 0]).all() and np.isnan(rows[0, 1:]).all()


@pytest.mark.parametrize("b, t, d, rows", [(2, 7, 3, 7), (3, 5, 4, 9), (0, 3, 2, 5)])
def test_positions(pair, b, t, d, rows):
    (x, x64), (table, table64), (dy, dy64), (out, out64) = pair.make(b, t, d), pair.make(rows, d), pair.make(b, t, d), pair.make(rows, d)
    pair.device.add_positions(x, table)
    pair.check(x, x64 + table64[:t])
    out64[:t] += dy64.sum(0)
    pair.device.positions_backward(dy, out, accumulate=True)
    pair.check(out, out64)
    pair.device.positions_backward(dy, out, accumulate=False)
    out64[:t], out64[t:] = dy64.sum(0), 0
    pair.check(out, out64)


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("b, t, h, k, e", [(2, 5, 4, 2, 6), (1, 1, 1, 1, 2), (2, 50, 9, 3, 16)])
def test_rotary(pair, b, t, h, k, e, per_sequence):
    qkv, qkv64 = pair.make(b, t, (h + 2 * k) * e)
    angle = pair.random.standard_normal((b, t, e // 2) if per_sequence else (t, e // 2)) * 3
    tables = [f(angle).astype(pair.wide) for f in (np.cos, np.sin)]
    on_gpu, exact = [pair.device.from_host(a) for a in tables], [a.astype(np.float64) for a in tables]
    for inverse in (False, True):
        qkv64 = pair.device.to_host(qkv).astype(np.float64)
        pair.device.rotary(qkv, h, k, *on_gpu, inverse=inverse)
        EXACT.rotary(qkv64, h, k, *exact, inverse=inverse)
        pair.check(qkv, qkv64)


# -- norms and activations -------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(0, 4), (3, 7), (2, 5, 33), (600, 40), (2, 1100)])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm(pair, shape, kind):
    d = shape[-1]
    (x, x64), (dy, dy64), (weight, weight64), (bias, bias64) = pair.make(*shape), pair.make(*shape), pair.make(d), pair.make(d)
    centred = kind == "layer"
    forward, backward = f"{kind}_norm", f"{kind}_norm_backward"
    extra, extra64 = ([bias], [bias64]) if centred else ([], [])
    y, stats = getattr(pair.device, forward)(x, weight, *extra, 1e-5)
    y64, stats64 = getattr(EXACT, forward)(x64, weight64, *extra64, 1e-5)
    pair.check(y, y64)
    assert pair.device.to_host(stats).dtype == pair.wide
    for accumulate in (False, True):
        targets, targets64 = zip(*(pair.make(d) for _ in range(2 if centred else 1)), strict=True)
        dx, dx64 = pair.make(*shape) if accumulate else (None, None)
        dx = getattr(pair.device, backward)(dy, x, weight, stats, *targets, accumulate, dx)
        dx64 = getattr(EXACT, backward)(dy64, x64, weight64, stats64, *targets64, accumulate, dx64)
        pair.check(dx, dx64, slack=4)
        for target, target64 in zip(targets, targets64, strict=True):
            pair.check(target, target64, slack=4)
    wanted = getattr(pair.device, backward)(dy, x, weight, stats, *([None] * len(targets)), False, None)
    pair.check(wanted, getattr(EXACT, backward)(dy64, x64, weight64, stats64, *([None] * len(targets)), False, None), slack=4)


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize("n", [0, 1, 3000])
def test_gelu(pair, approximate, n):
    (x, x64), (dy, dy64) = pair.make(n, spread=3), pair.make(n)
    pair.check(pair.device.gelu(x, approximate), EXACT.gelu(x64, approximate))
    pair.check(pair.device.gelu_backward(dy, x, approximate), EXACT.gelu_backward(dy64, x64, approximate), slack=3)


@pytest.mark.parametrize("n, f", [(0, 3), (1, 1), (30, 33), (5, 144)])
def test_swiglu(pair, n, f):
    (gate_up, gate_up64), (dy, dy64) = pair.make(n, 2 * f, spread=2), pair.make(n, f)
    pair.check(pair.device.swiglu(gate_up), EXACT.swiglu(gate_up64))
    pair.check(pair.device.swiglu_backward(dy, gate_up), EXACT.swiglu_backward(dy64, gate_up64))


def test_activations_at_the_ends(pair):
    x = pair.device.from_host(np.array([[-1e4, 1e4, -200, 200, 0, -0.0]]).astype(pair.dtype))
    ones = pair.device.from_host(np.ones((1, 6), pair.dtype))
    for approximate in (False, True):
        pair.check(pair.device.gelu(x, approximate), np.array([[0, 1e4, 0, 200, 0, 0]]))
        pair.check(pair.device.gelu_backward(ones, x, approximate), np.array([[0, 1, 0, 1, 0.5, 0.5]]))
    pair.check(pair.device.swiglu(x), np.array([[0, 0, 0]]))


# -- attention -------------------------------------------------------------------------------
@pytest.mark.parametrize("documents", [0, 3])
@pytest.mark.parametrize("b, t, h, k, e", [(1, 1, 1, 1, 1), (2, 7, 4, 2, 3), (1, 70, 1, 1, 5), (1, 130, 2, 1, 16), (2, 33, 6, 2, 40)])
def test_attention(pair, b, t, h, k, e, documents):
    qkv, qkv64 = pair.make(b, t, (h + 2 * k) * e)
    dy, dy64 = pair.make(b, t, h * e)
    segments = np.sort(pair.random.integers(0, documents, (b, t)), axis=1).astype(np.int32) if documents else None
    on_gpu = None if segments is None else pair.device.from_host(segments)
    scale = e**-0.5
    y, lse = pair.device.attention(qkv, h, k, scale, on_gpu)
    y64, lse64 = EXACT.attention(qkv64, h, k, scale, segments)
    pair.check(y, y64, of=1)
    pair.check(lse, lse64, dtype=pair.wide, of=1)
    dqkv = pair.device.attention_backward(dy, qkv, y, lse, h, k, scale, on_gpu)
    pair.check(dqkv, EXACT.attention_backward(dy64, qkv64, y64, lse64, h, k, scale, segments), slack=2, of=1)


def test_attention_with_scores_far_from_zero(pair):
    """A late key far above the rest: the running maximum rises between tiles, sums before it are rescaled to nothing."""
    for where in (0, 40, 99):
        qkv, qkv64 = pair.make(1, 100, 12)
        qkv64[0, :, 0], qkv64[0, where, 4] = 1, 300
        qkv64 = qkv64.astype(pair.dtype).astype(np.float64)
        y, lse = pair.device.attention(pair.device.from_host(qkv64.astype(pair.dtype)), 1, 1, 1.0)
        y64, lse64 = EXACT.attention(qkv64, 1, 1, 1.0)
        pair.check(y, y64)
        pair.check(lse, lse64, dtype=pair.wide)


def test_cached_attention(pair):
    b, t, h, k, e = 2, 9, 6, 2, 40
    qkv, qkv64 = pair.make(b, t, (h + 2 * k) * e)
    y64, _ = EXACT.attention(qkv64, h, k, e**-0.5)
    cache = pair.device.empty((b, 12, 2 * k * e), pair.dtype)
    past = 0
    for count in (5, 1, 3):
        part = pair.device.from_host(qkv64[:, past:past + count].astype(pair.dtype))
        pair.check(pair.device.cached_attention(part, cache, past, h, k, e**-0.5), y64[:, past:past + count])
        past += count


# -- loss, dropout, optimizer ----------------------------------------------------------------
@pytest.mark.parametrize("n, d, v, ignored", [(1, 1, 1, 0.0), (40, 6, 101, 0.5), (40, 6, 101, 1.0), (0, 4, 5, 0.0), (9, 5, 900, 0.2)])
@pytest.mark.parametrize("chunk", [256 << 20, 4000])
def test_cross_entropy(pair, monkeypatch, n, d, v, ignored, chunk):
    monkeypatch.setitem(type(pair.device).cross_entropy.__globals__, "LOGIT_BYTES", chunk)
    (x, x64), (table, table64), (dtable, _) = pair.make(n, d), pair.make(v, d), pair.make(v, d)
    targets, targets64 = pair.ids(v, n, ignored=ignored)
    for accumulate in (False, True):
        before = pair.device.to_host(dtable).astype(np.float64)
        value, dx = pair.device.cross_entropy(x, table, targets, IGNORE, 0.37, dtable, accumulate, True)
        value64, dx64 = EXACT.cross_entropy(x64, table64, targets64, IGNORE, 0.37, before, accumulate, True)
        assert_allclose(pair.device.read([value]), [value64], rtol=1e-5 if pair.dtype != np.float64 else 1e-13, atol=1e-12)
        pair.check(dx, dx64, slack=3, of=0.1)
        pair.check(dtable, before, slack=3, of=0.2)
    alone, none = pair.device.cross_entropy(x, table, targets, IGNORE, 1.0, None, False, False)
    assert none is None and pair.device.read([alone]) == pair.device.read([value])


def test_an_unknown_target_makes_the_loss_nan(pair):
    for wrong in (-1, 3):
        targets = pair.device.from_host(np.array([0, wrong]))
        value, _ = pair.device.cross_entropy(pair.make(2, 2)[0], pair.make(3, 2)[0], targets, IGNORE, 1.0, None, False, False)
        assert np.isnan(pair.device.read([value])[0])


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.9])
def test_dropout_draws_the_same_mask_as_numpy(pair, probability):
    x = np.ones((30, 41), np.float32).astype(pair.dtype)
    expected = EXACT.dropout(np.ones((30, 41), np.float32), probability, (3, 0xFFFFFFFF))
    mask = np.where(expected != 0, 1 / (1 - probability), 0).astype(pair.wide).astype(pair.dtype)
    got = pair.device.dropout(pair.device.from_host(x), probability, (3, 0xFFFFFFFF))
    assert_array_equal(pair.device.to_host(got), mask)
    in_place = pair.device.from_host(x)
    assert pair.device.dropout(in_place, probability, (3, 0xFFFFFFFF), out=in_place) is in_place
    assert_array_equal(pair.device.to_host(in_place), mask)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(pair, weight_decay):
    settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": weight_decay, "step": 3, "gradient_scale": 0.5}
    masters = [pair.make(1000, dtype=pair.wide) for _ in range(3)]
    (weight, weight64), (m, m64), (v, v64) = masters
    pair.device.cast(pair.device.from_host(v64 := v64**2), v)
    gradient, gradient64 = pair.make(1000)
    copy = pair.device.empty(1000, pair.dtype)
    pair.device.adamw(weight, gradient, m, v, **settings, copy=copy)
    EXACT.adamw(weight64, gradient64, m64, v64, **settings)
    for got, expected in ((weight, weight64), (m, m64), (v, v64)):
        assert_allclose(pair.device.to_host(got), expected, rtol=1e-5, atol=1e-6)
    assert_array_equal(pair.device.to_host(copy), pair.device.to_host(weight).astype(pair.dtype))


@pytest.mark.parametrize("keep", [0.0, 1.0, 0.9])
def test_blend(pair, keep):
    (out, out64), (x, x64) = pair.make(1003, dtype=pair.wide), pair.make(1003)
    if keep == 0:
        out.fill(np.nan)
    pair.device.blend(out, x, keep, -0.3)
    assert_allclose(pair.device.to_host(out), keep * out64 - 0.3 * x64, rtol=1e-6, atol=1e-6)
    pair.device.blend(x, x, 0, 0.5)
    assert_array_equal(pair.device.to_host(x).astype(np.float64), x64 / 2)


def test_round_at_random_draws_the_same_bits_as_numpy(gpu):
    values = np.random.default_rng(0).standard_normal(3001).astype(np.float32)
    values[:4] = np.inf, -np.inf, 0, 1e-40
    for start in (0, 70_000, (5 << 32) + 11):
        expected, out = np.empty(3001, ml_dtypes.bfloat16), gpu.empty(3001, np.dtype(ml_dtypes.bfloat16))
        EXACT.round_at_random(values.copy(), expected, (3, 0xFFFFFFFF), start)
        gpu.round_at_random(gpu.from_host(values), out, (3, 0xFFFFFFFF), start)
        assert_array_equal(gpu.to_host(out).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("size", [0, 1, 5003])
def test_sum_of_squares(pair, size):
    x, x64 = pair.make(size)
    assert_allclose(pair.device.read([pair.device.sum_of_squares(x)]), (x64**2).sum(), rtol=1e-13)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_ordered_sum(pair, count):
    parts, parts64 = pair.make(count, 300)
    out, out64 = pair.make(300, dtype=pair.wide)
    rounded = parts64.astype(pair.wide)
    for accumulate in (False, True):
        expected = pair.device.to_host(out).copy()
        NumpyDevice().ordered_sum(rounded, expected, accumulate)
        for given in (parts, [parts[i] for i in range(count)]):
            before = pair.device.empty(300, pair.wide)
            pair.device.cast(out, before)
            pair.device.ordered_sum(given, before, accumulate)
            assert_array_equal(pair.device.to_host(before), expected)  # the same tree, so the same bits


def test_memory_is_counted(gpu):
    from mpshard.device import Kind

    gpu.memory.reset_peak()
    before = gpu.memory.current()
    a = gpu.empty((3, 5), np.float32, Kind.GATHERED)
    view = a[1:]
    del a
    assert gpu.memory.current(Kind.GATHERED) == 60 and gpu.memory.current() == before + 60
    del view
    assert gpu.memory.current() == before and gpu.memory.peak() == before + 60
