"""Products of matrices rounded to 8 bits on the CPU: the numbers that ml_dtypes rounds to, and float64's products of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpshard.config import ConfigError, load
from mpshard.device.numpy_fp8 import E4M3, E5M2, scale_to_fp8
from mpshard.shard.precision import Precision

from .reference import fp8


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("spread", [1e-25, 1e-3, 1.0, 1e25])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (700, 300)])
def test_rounding(device, random, shape, spread, gradient):
    x = (random.standard_normal(shape) * spread * np.exp(4 * random.standard_normal(shape))).astype(np.float32)
    x.flags.writeable = False
    found = device.round_to_fp8(x, gradient)
    assert found.dtype == x.dtype
    assert_array_equal(found, fp8(x, gradient))
    turned = device.round_to_fp8(x.T, gradient)
    assert turned.T.flags.c_contiguous  # products read it either way round
    assert_array_equal(turned.T, found)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=str)
def test_the_largest_element_is_just_under_the_largest_number(form):
    top = float(ml_dtypes.finfo(form).max)
    for largest in (top, np.nextafter(np.float32(top), np.float32(1e9)), np.nextafter(np.float32(top), np.float32(0)), 1.0, 3e38, 1e-20):
        assert top / 2 < scale_to_fp8(float(largest), form) * float(largest) <= top
    for small in (0.0, 1e-45, 1e-38):  # a scale that float32 holds, and one over it too
        scale = scale_to_fp8(small, form)
        assert 0 < np.float32(scale) < np.inf and np.float32(1 / scale) >= np.finfo(np.float32).tiny


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_weights_on_their_way(device, random, n):
    """Each block of 128 by itself, whatever the others' size; slices end to end."""
    parts = [(random.standard_normal(n) * np.exp(8 * random.standard_normal(n))).astype(np.float32) for _ in range(2)]
    words = [np.empty(n + -(-n // 128), np.uint8) for _ in parts]
    for x, of_x in zip(parts, words, strict=True):
        device.pack_fp8(x, of_x)
    found = np.empty(2 * n, np.float32)
    device.unpack_fp8(np.concatenate(words), found, 2)
    for x, y in zip(parts, found.reshape(2, n), strict=True):
        for start in range(0, n, 128):
            block = x[start:start + 128].astype(np.float64)
            scale = 2.0 ** np.floor(np.log2(448 / np.abs(block).max()))
            assert_array_equal(y[start:start + 128], (block * scale).astype(E4M3).astype(np.float64) / scale)


def test_weights_that_are_nothing_or_not_finite(device):
    x = np.zeros(4 * 128, np.float32)
    x[128], x[256], x[385] = np.nan, np.inf, 2.0**-120
    words, found = np.empty(4 * 129, np.uint8), np.empty_like(x)
    device.pack_fp8(x, words)
    device.unpack_fp8(words, found, 1)
    assert (found[:128] == 0).all() and np.isnan(found[128:384]).all() and (found[384:] == 0).all()


@pytest.mark.parametrize("gradients", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (64, 48, 32), (0, 3, 2), (3, 0, 2)])
def test_products_are_of_the_rounded_inputs(device, random, m, k, n, turned, gradients):
    a, b = random.standard_normal((k, m) if turned[0] else (m, k)), random.standard_normal((n, k) if turned[1] else (k, n))
    a, b = (x.astype(np.float32) for x in (a, b))
    a, b = a.T if turned[0] else a, b.T if turned[1] else b
    bias = random.standard_normal(n).astype(np.float32)
    expected = fp8(a, gradients[0]) @ fp8(b, gradients[1])
    near = {"rtol": 1e-5, "atol": 1e-5}
    assert_allclose(device.matmul_fp8(a, b, gradients), expected, **near)
    assert_allclose(device.matmul_fp8(a, b, gradients, bias=bias), expected + bias, **near)
    out = np.ones((m, n), np.float32)
    assert device.matmul_fp8(a, b, gradients, out=out, accumulate=True) is out
    assert_allclose(out, expected + 1, **near)
    device.matmul_fp8(a, b, gradients, out=out)
    assert_allclose(out, expected, **near)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_everywhere(device, wrong):
    x = np.ones((4, 6), np.float32)
    x[1, 2] = wrong
    for gradient in (False, True):
        assert np.isnan(device.round_to_fp8(x, gradient)).all()
    assert_array_equal(device.round_to_fp8(np.array([[0.0, -0.0]], np.float32), False), [[0, 0]])


def test_what_the_configuration_says():
    config = load(None, ["precision.param=bf16", "precision.gather=fp8_e4m3", "precision.products=fp8"])
    assert Precision.of(config.precision) == Precision("bf16", "fp8_e4m3", products="fp8")
    assert Precision.of(load(None).precision) == Precision()


def test_a_format_that_is_not_known():
    with pytest.raises(ConfigError, match="^precision.products='fp16' is not known; use fp8$"):
        Precision(products="fp16")
