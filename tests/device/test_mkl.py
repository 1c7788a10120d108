"""bfloat16 products: MKL's where it is installed, else a stand-in for its function that shows how it is called."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpshard.device import mkl
from mpshard.device.numpy_device import NumpyDevice
from tests.cblas import cblas


@pytest.fixture(params=["stand-in", "MKL"])
def bf16(request):
    device = NumpyDevice(poison=True)
    device.bf16_product = cblas if request.param == "stand-in" else mkl.load()
    if isinstance(device.bf16_product, str):
        pytest.skip(device.bf16_product)
    return device


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("a_way", ["rows", "columns", "part"])
@pytest.mark.parametrize("b_way", ["rows", "columns", "part"])
@pytest.mark.parametrize("out_way", ["rows", "columns", "part"])
def test_any_layout(bf16, random, a_way, b_way, out_way, accumulate):
    def laid(rows, columns, way):
        if way == "columns":
            return random.standard_normal((columns, rows), np.float32).T
        return random.standard_normal((rows, columns + 3 * (way == "part")), np.float32)[:, :columns]

    a, b, out = laid(7, 33, a_way), laid(33, 12, b_way), laid(7, 12, out_way)
    expected = rounded(a) @ rounded(b) + (out if accumulate else 0)
    bf16.matmul(a, b, out=out, accumulate=accumulate)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_nothing_to_multiply(bf16):
    out = bf16.matmul(np.zeros((3, 0), np.float32), np.zeros((0, 4), np.float32))
    np.testing.assert_array_equal(out, np.zeros((3, 4)))


def test_float64_stays_float64(bf16, random):
    a = random.standard_normal((5, 6))
    np.testing.assert_array_equal(bf16.matmul(a, a.T), a @ a.T)


def test_the_loss_is_nearly_the_same(bf16, random):
    x, table, targets = (random.standard_normal((40, 16), np.float32), random.standard_normal((50, 16), np.float32),
                         random.integers(50, size=40))
    results = []
    for device in (NumpyDevice(), bf16):
        dtable = np.empty_like(table)
        value, dx = device.cross_entropy(x, table, targets, -100, 1.0, dtable, False, True)
        results.append((value, dx, dtable))
    for exact, near in zip(*results, strict=True):
        np.testing.assert_allclose(near, exact, rtol=0, atol=0.02 * np.abs(exact).max())
