"""Dense, embedding, norm and activation kernels: float64 against formulas and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpshard.device import open_device
from mpshard.device.numpy_activation import erf, normal_distribution

from . import reference
from .reference import slope

TIGHT = {"rtol": 1e-11, "atol": 1e-12}
SLOPE = {"rtol": 1e-7, "atol": 1e-8}
SINGLE = {"rtol": 2e-5, "atol": 2e-5}
NORM_SHAPES = [(0, 4), (1, 1), (3, 7), (2, 5, 33), (700, 129)]  # the last needs several blocks


def inputs(random, *shapes):
    return [random.standard_normal(shape) for shape in shapes]


def unchanged(*arrays):
    """Read-only from here on: a kernel that writes into an input raises."""
    for array in arrays:
        array.flags.writeable = False


# -- dense -----------------------------------------------------------------------------------


@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (0, 3, 2), (3, 0, 2), (5, 7, 3), (300, 20, 700)])
@pytest.mark.parametrize("turn_a", [False, True])
@pytest.mark.parametrize("turn_b", [False, True])
def test_matmul(device, random, m, k, n, turn_a, turn_b):
    a, b = random.standard_normal((k, m) if turn_a else (m, k)), random.standard_normal((n, k) if turn_b else (k, n))
    unchanged(a, b)
    a, b = a.T if turn_a else a, b.T if turn_b else b
    assert_allclose(device.matmul(a, b), a @ b, **TIGHT)
    out = np.full((m, n), np.nan)
    assert device.matmul(a, b, out=out) is out
    assert_allclose(out, a @ b, **TIGHT)
    assert device.matmul(a, b, out=out, accumulate=True) is out
    assert_allclose(out, 2 * (a @ b), **TIGHT)
    assert device.matmul(a.astype(np.float32), b.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7), (900, 65)])
def test_bias_and_its_gradient(device, random, shape):
    y, dy, bias = inputs(random, shape, shape, shape[1])
    expected = y + bias
    unchanged(bias, dy)
    device.add_bias(y, bias)
    assert_array_equal(y, expected)
    total = np.full(shape[1], np.nan)
    device.column_sum(dy, total, accumulate=False)
    assert_allclose(total, dy.sum(0), **TIGHT)
    device.column_sum(dy, total, accumulate=True)
    assert_allclose(total, 2 * dy.sum(0), **TIGHT)
    x = y.copy()
    device.add(y, dy)
    assert_array_equal(y, x + dy)


# -- embedding -------------------------------------------------------------------------------


@pytest.mark.parametrize("b, t, v, d", [(1, 1, 1, 1), (2, 7, 5, 3), (0, 4, 3, 2), (3, 90, 11, 129), (2, 300, 1000, 70)])
def test_embedding(device, random, b, t, v, d):
    ids = random.integers(0, v, (b, t))
    table, dy, out = inputs(random, (v, d), (b, t, d), (v, d))
    unchanged(ids, table, dy)
    assert_array_equal(device.embedding(ids, table), table[ids])
    expected = np.zeros((v, d))
    np.add.at(expected, ids.reshape(-1), dy.reshape(-1, d))
    before = out.copy()
    device.embedding_backward(dy, ids, out, accumulate=True)
    assert_allclose(out, before + expected, **TIGHT)
    out.fill(np.nan)
    device.embedding_backward(dy, ids, out, accumulate=False)
    assert_allclose(out, expected, **TIGHT)
    again = np.empty_like(out)
    device.embedding_backward(dy, ids, again, accumulate=False)
    assert_array_equal(again, out)


def test_embedding_refuses_ids_outside_the_table(device):
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="table of 3 rows"):
            device.embedding(np.array([[0, wrong]]), np.zeros((3, 2)))


@pytest.mark.parametrize("b, t, d, rows", [(2, 7, 3, 7), (3, 5, 4, 9), (1, 1, 1, 2), (0, 3, 2, 5), (2, 300, 200, 301)])
def test_positions(device, random, b, t, d, rows):
    x, table, dy, out = inputs(random, (b, t, d), (rows, d), (b, t, d), (rows, d))
    expected = x + table[:t]
    unchanged(table, dy)
    device.add_positions(x, table)
    assert_array_equal(x, expected)
    before = out.copy()
    device.positions_backward(dy, out, accumulate=True)
    before[:t] += dy.sum(0)
    assert_allclose(out, before, **TIGHT)
    device.positions_backward(dy, out, accumulate=False)
    assert_allclose(out[:t], dy.sum(0), **TIGHT)
    assert not out[t:].any()


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("b, t, h, k, e", [(2, 5, 4, 2, 6), (1, 1, 1, 1, 2), (2, 150, 9, 3, 16), (3, 7, 2, 1, 4)])
def test_rotary(device, random, b, t, h, k, e, per_sequence):
    qkv = random.standard_normal((b, t, (h + 2 * k) * e))
    angle = random.standard_normal((b, t, e // 2) if per_sequence else (t, e // 2)) * 3
    cos, sin = np.cos(angle), np.sin(angle)
    unchanged(cos, sin)
    expected = qkv.copy()
    for head in range(h + k):
        part = expected[..., head * e : (head + 1) * e]
        part[...] = reference.rotary(part, cos, sin)
    turned, single = qkv.copy(), qkv.astype(np.float32)
    device.rotary(turned, h, k, cos, sin)
    assert_allclose(turned, expected, **TIGHT)
    device.rotary(turned, h, k, cos, sin, inverse=True)
    assert_allclose(turned, qkv, **TIGHT)
    device.rotary(single, h, k, cos.astype(np.float32), sin.astype(np.float32))
    assert_allclose(single, expected, **SINGLE)


# -- norms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", NORM_SHAPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm(device, random, shape, kind):
    d, eps = shape[-1], 1e-5
    x, dy, weight, bias, residual = inputs(random, shape, shape, d, d, shape)
    forward = {
        "layer": lambda *a: device.layer_norm(*a, eps),
        "rms": lambda x, weight, bias: device.rms_norm(x, weight, eps),
    }[kind]
    expected = {
        "layer": lambda: reference.layer_norm(x, weight, bias, eps),
        "rms": lambda: reference.rms_norm(x, weight, eps),
    }[kind]

    def backward(dtype, dweight, dbias, accumulate, dx):
        arrays = [a.astype(dtype) for a in (dy, x, weight)]
        stats = forward(arrays[1], arrays[2], bias.astype(dtype))[1]
        unchanged(*arrays, stats)
        if kind == "layer":
            return device.layer_norm_backward(*arrays, stats, dweight, dbias, accumulate, dx)
        return device.rms_norm_backward(*arrays, stats, dweight, accumulate, dx)

    assert_allclose(forward(x, weight, bias)[0], expected(), **TIGHT)
    single = forward(*(a.astype(np.float32) for a in (x, weight, bias)))[0]
    assert single.dtype == np.float32
    assert_allclose(single, expected(), rtol=1e-4, atol=1e-4 if d == 1 else 2e-5)

    dweight, dbias = np.full((2, d), np.nan)
    dx = backward(np.float64, dweight, dbias, False, None)
    directions = inputs(random, shape, d, d)
    gradients = [(x, dx), (weight, dweight)] + ([(bias, dbias)] if kind == "layer" else [])
    for (array, gradient), direction in zip(gradients, directions, strict=False):
        numeric = slope(lambda: float((dy * expected()).sum()), array, direction)
        assert_allclose((gradient * direction).sum(), numeric, rtol=2e-6, atol=1e-6)

    once = dweight.copy(), dbias.copy()
    into = residual.copy()
    assert backward(np.float64, dweight, dbias, True, into) is into
    assert_allclose(into, residual + dx, **TIGHT)
    assert_allclose(dweight, 2 * once[0], **TIGHT)
    if kind == "layer":
        assert_allclose(dbias, 2 * once[1], **TIGHT)
    assert_allclose(backward(np.float64, None, None, False, None), dx, **TIGHT)
    if d > 1:
        assert_allclose(backward(np.float32, None, None, False, None), dx, rtol=1e-3, atol=1e-4)


# -- activations -----------------------------------------------------------------------------


def test_erf_and_normal_distribution():
    x = np.concatenate([np.linspace(-9, 9, 20_001), [0.0, -0.0, 40.0, -40.0]])
    expected = np.array([math.erf(value) for value in x])
    assert_allclose(erf(x), expected, rtol=0, atol=1e-15)
    assert_allclose(erf(x.astype(np.float32)), expected, rtol=0, atol=5e-7)
    x = np.linspace(-35, 9, 5001)
    cdf, density, scratch = np.empty((3, x.size))
    normal_distribution(x, cdf, density, scratch)
    exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    assert_allclose(cdf, exact, rtol=1e-12)  # far in the tail the argument's own rounding counts x^2 times
    assert_allclose(density, np.exp(-x * x / 2) / math.sqrt(2 * math.pi), rtol=1e-13)


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (200_001,)])
def test_gelu(device, random, approximate, shape):
    x, dy, direction = inputs(random, shape, shape, shape)
    x *= 3
    y = device.gelu(x, approximate)
    assert_allclose(y, reference.gelu(x, approximate), rtol=1e-12, atol=1e-15)
    single = device.gelu(x.astype(np.float32), approximate)
    assert single.dtype == np.float32
    assert_allclose(single, y, **SINGLE)
    gradients = [device.gelu_backward(dy, x, approximate), device.gelu_backward(dy, x, approximate, y)]
    small = slice(0, 2000)
    numeric = slope(lambda: reference.gelu(x[small], approximate), x, np.ones_like(x))
    for gradient in gradients:
        assert_allclose(gradient[small], dy[small] * numeric, rtol=1e-7, atol=1e-8)
        assert_allclose(gradient, gradients[0], rtol=1e-10, atol=1e-13)
    x32, dy32 = x.astype(np.float32), dy.astype(np.float32)
    unchanged(x32, dy32, single)
    for y32 in (None, single):
        gradient = device.gelu_backward(dy32, x32, approximate, y32)
        assert gradient.dtype == np.float32
        assert_allclose(gradient, gradients[0], **SINGLE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.filterwarnings("error")
def test_gelu_at_the_ends(device, dtype, approximate):
    x = np.array([0.0, -0.0, 1e-30, -1e-30, 1e-38, 20, -20, 200, -200, 1e4, -1e4], dtype)
    y = device.gelu(x, approximate)
    assert_allclose(y, np.where(np.abs(x) > 1, np.maximum(x, 0), x / 2), rtol=1e-6, atol=1e-30)
    for known in (None, y):
        slope_there = device.gelu_backward(np.ones_like(x), x, approximate, known)
        assert_allclose(slope_there, [0.5] * 5 + [1, 0, 1, 0, 1, 0], rtol=1e-6, atol=1e-28)


@pytest.mark.parametrize("n, f", [(0, 3), (1, 1), (5, 7), (300, 333)])
def test_swiglu(device, random, n, f):
    gate_up, dy, direction = inputs(random, (n, 2 * f), (n, f), (n, 2 * f))
    y, dx = device.swiglu(gate_up), device.swiglu_backward(dy, gate_up)
    assert_allclose(y, reference.swiglu(gate_up), **TIGHT)
    numeric = slope(lambda: float((dy * reference.swiglu(gate_up)).sum()), gate_up, direction)
    assert_allclose((dx * direction).sum(), numeric, **SLOPE)
    assert_allclose(device.swiglu_backward(dy, gate_up, y), dx, rtol=1e-11, atol=1e-13)
    single, dy32 = gate_up.astype(np.float32), dy.astype(np.float32)
    y32 = device.swiglu(single)
    unchanged(single, dy32, y32)
    assert_allclose(y32, y, **SINGLE)
    for known in (None, y32):
        assert_allclose(device.swiglu_backward(dy32, single, known), dx, **SINGLE)


@pytest.mark.filterwarnings("error")
def test_swiglu_at_the_ends(device):
    gate_up = np.array([[-1e4, 1e4, 0, 0, 2, 4, 2, 3, 5, 0, 0, -1e-30]], np.float32)
    s2, s4 = 1 / (1 + np.exp(-np.array([2.0, 4.0])))
    y = device.swiglu(gate_up)
    assert_allclose(y, [[0, 3e4, 0, 0, 0, -4e-30 * s4]], rtol=1e-6, atol=1e-37)
    for known in (None, y):
        dx = device.swiglu_backward(np.ones((1, 6), np.float32), gate_up, known)
        assert_allclose(dx, [[0, 3, 2.5, 0, 0, 0, 0, 1e4, 0, 0, 2 * s2, 4 * s4]], rtol=1e-6, atol=1e-28)


# -- opening ---------------------------------------------------------------------------------


def test_open_device():
    assert open_device("numpy").name == "numpy" and not open_device("numpy").poison
    assert open_device("numpy", poison=True).poison
    with pytest.raises(ValueError, match='not "cuda"'):
        open_device("cuda")


def test_host_copies(device, random):
    array = random.standard_normal((3, 4))
    copy = device.from_host(array)
    array[0] = 0
    assert copy[0].all() and copy.dtype == np.float64 and device.to_host(copy) is copy
    assert not device.zeros((3, 2), np.float32).any()
    assert device.memory.current() > 0
