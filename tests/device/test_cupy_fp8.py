"""The CuPy device's numbers of 8 bits, bit for bit ml_dtypes', and products of them; as in test_cupy_kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpshard.device.numpy_device import NumpyDevice
from mpshard.device.numpy_fp8 import E4M3, E5M2, scale_to_fp8

from .reference import fp8

pytestmark = pytest.mark.gpu
FORMS = {False: E4M3, True: E5M2}
EXACT = NumpyDevice()
TYPES = [np.dtype(name) for name in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)]


def converted(gpu, x, gradient, turned=False):
    """The 8 bits of x and what they are to be multiplied with."""
    array = gpu.from_host(np.ascontiguousarray(x.T)).T if turned else gpu.from_host(x)
    words, scale = gpu.to_fp8(array, gradient)
    assert words.shape == x.shape
    return gpu.to_host(words), gpu.to_host(scale)[0]


@pytest.mark.parametrize("gradient", [False, True])
def test_every_number_of_16_bits_is_rounded_as_by_ml_dtypes(gpu, gradient):
    """All float16 numbers, and float32 ones a little above and below every number of 8 bits and every middle of two."""
    form = FORMS[gradient]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    numbers = np.arange(128, dtype=np.uint8).view(form).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))])
    top = float(ml_dtypes.finfo(form).max)
    for values in (halves[np.abs(halves) <= top], points[points <= top]):
        x = np.append(values, [top] * (1 + -len(values) % 3)).astype(np.float32).reshape(-1, 1)  # the largest one: the scale is 1
        words, scale = converted(gpu, x, gradient)
        assert scale == 1
        assert_array_equal(words, x.astype(form).view(np.uint8))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 64), (130, 70), (48, 200)])
def test_matrices(gpu, shape, dtype, gradient, turned):
    random = np.random.default_rng(0)
    x = (random.standard_normal(shape) * np.exp(2 * random.standard_normal(shape))).clip(-1e4, 1e4).astype(np.float16).astype(dtype)
    words, scale = converted(gpu, x, gradient, turned)
    expected = scale_to_fp8(float(np.abs(x).max()), FORMS[gradient])
    assert scale == np.float32(1 / expected)
    assert_array_equal(words, (x.astype(np.float64) * expected).astype(FORMS[gradient]).view(np.uint8))
    array = gpu.from_host(np.ascontiguousarray(x.T)).T if turned else gpu.from_host(x)
    found = gpu.round_to_fp8(array, gradient)
    assert found.dtype == dtype and found.strides == array.strides
    assert_array_equal(gpu.to_host(found).astype(np.float64), fp8(x, gradient))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("largest", [3e38, 1.0, 1e-20, 1e-37, 1e-44, 0.0])
def test_scales_of_any_size_are_numpys(gpu, largest, gradient):
    x = (np.linspace(-1, 1, 600) * largest).astype(np.float32).reshape(20, 30)
    words, scale = converted(gpu, x, gradient)
    expected = EXACT.round_to_fp8(x, gradient)
    assert_array_equal(words.view(FORMS[gradient]).astype(np.float64) * float(scale), expected)
    assert_array_equal(gpu.to_host(gpu.round_to_fp8(gpu.from_host(x), gradient)), expected)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_everywhere(gpu, wrong):
    x = np.ones((40, 60), np.float32)
    x[39, 59] = wrong
    for gradient in (False, True):
        for turned in (False, True):
            words, scale = converted(gpu, x, gradient, turned)
            assert np.isnan(scale) and np.isnan(words.view(FORMS[gradient]).astype(np.float32)).all()
        assert np.isnan(gpu.to_host(gpu.round_to_fp8(gpu.from_host(x), gradient))).all()


@pytest.mark.parametrize("gradients", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (32, 48, 16), (0, 3, 2), (3, 0, 2)])
def test_products_are_of_the_rounded_inputs(gpu, m, k, n, dtype, gradients):
    random = np.random.default_rng(1)
    wide = np.dtype(np.float32)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for turned in ((False, False), (True, False), (False, True)):
        a, b = random.standard_normal((k, m) if turned[0] else (m, k)), random.standard_normal((n, k) if turned[1] else (k, n))
        a, b, bias = a.astype(dtype), b.astype(dtype), random.standard_normal(n).astype(dtype)
        on_gpu = [gpu.from_host(x) for x in (a, b, bias)]
        a, b = a.T if turned[0] else a, b.T if turned[1] else b
        left, right = on_gpu[0].T if turned[0] else on_gpu[0], on_gpu[1].T if turned[1] else on_gpu[1]
        expected = fp8(a, gradients[0]) @ fp8(b, gradients[1])
        near = {"rtol": 0, "atol": 4 * unit * max(1.0, float(np.abs(expected).max(initial=0)))}
        found = gpu.to_host(gpu.matmul_fp8(left, right, gradients, bias=on_gpu[2]))
        assert found.dtype == dtype
        assert_allclose(found.astype(np.float64), expected + bias.astype(np.float64), **near)
        out = gpu.from_host(np.ones((m, n), wide))
        assert gpu.matmul_fp8(left, right, gradients, out=out, accumulate=True) is out
        assert_allclose(gpu.to_host(out), expected + 1, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max(initial=0))))


def test_a_block_turns_several_tiles(gpu, monkeypatch):
    monkeypatch.setitem(type(gpu).to_fp8.__globals__, "TILES_DOWN", 2)
    x = np.random.default_rng(3).standard_normal((70, 300)).astype(np.float32)
    words, scale = converted(gpu, x, False, turned=True)
    assert_array_equal(words.view(E4M3).astype(np.float64) * float(scale), fp8(x, False))


def test_gaps_between_rows(gpu):
    x = np.random.default_rng(2).standard_normal((6, 20)).astype(np.float32)
    on_gpu = gpu.from_host(x)
    assert_array_equal(gpu.to_host(gpu.round_to_fp8(on_gpu[:, 3:11], False)), fp8(x[:, 3:11], False))
    assert_array_equal(gpu.to_host(gpu.round_to_fp8(on_gpu[:, 3:11].T, False)), fp8(x[:, 3:11], False).T)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000, 5000])
def test_weights_on_their_way_are_numpys(gpu, n, dtype):
    random = np.random.default_rng(n)
    x = (random.standard_normal(n) * np.exp(2 * random.standard_normal(n))).astype(np.float16).astype(dtype)
    x[n // 2:] *= 0
    expected = np.empty(n + -(-n // 128), np.uint8)
    EXACT.pack_fp8(x.astype(np.float32), expected)
    words = gpu.zeros(len(expected), np.uint8)
    gpu.pack_fp8(gpu.from_host(x), words)
    assert_array_equal(gpu.to_host(words), expected)
    values, out = np.empty(3 * n, np.float32), gpu.empty(3 * n, dtype)
    EXACT.unpack_fp8(np.tile(expected, 3), values, 3)
    gpu.unpack_fp8(gpu.from_host(np.tile(expected, 3)), out, 3)
    assert_array_equal(gpu.to_host(out), values.astype(dtype))


def test_weights_that_are_not_finite(gpu):
    x = np.zeros(3 * 128, np.float32)
    x[130], x[260], x[5] = np.nan, np.inf, 1e-44
    words, out = gpu.zeros(3 * 129, np.uint8), gpu.empty(x.size, np.float32)
    gpu.pack_fp8(gpu.from_host(x), words)
    gpu.unpack_fp8(words, out, 1)
    found = gpu.to_host(out)
    assert (found[:128] == 0).all() and np.isnan(found[128:]).all()
