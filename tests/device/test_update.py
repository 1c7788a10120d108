"""Dropout, AdamW and the sums over flat arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from mpshard.device.numpy_random import random_words

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}  # of adamw_golden.npz


# -- dropout ---------------------------------------------------------------------------------


def word(key: tuple[int, int], index: int) -> int:
    """The generator as its module describes it, one element at a time in Python integers."""

    def mix(x: int) -> int:
        x &= 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    low, high = index & 0xFFFFFFFF, index >> 32
    a = key[0] ^ mix(key[1] + 0x9E3779B9)
    b = key[1] ^ mix(a + high + 0x85EBCA6B)
    a ^= mix(b + 0xC2B2AE35)
    return mix(mix(low ^ a) + b)


@pytest.mark.parametrize("start", [0, 12345, 2**32 - 64, 2**32, 5 * 2**32 + 64])
def test_words(start):
    counter = np.arange(64, dtype=np.uint32)
    out, scratch = np.empty((2, 64), np.uint32)
    for key in ((0, 0), (1, 0), (0xFFFFFFFF, 0xFFFFFFFF)):
        random_words(key, start, counter, out, scratch)
        assert out.tolist() == [word(key, start + i) for i in range(64)]


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_dropout_mask(device, probability):
    n = 400_000
    x = np.ones((n // 4, 4), np.float32)
    y = device.dropout(x, probability, (3, 4))
    kept = y != 0
    assert_array_equal(y[kept], np.float32(1 / (1 - probability)))
    sigma = (probability * (1 - probability) / n) ** 0.5
    assert abs(kept.mean() - (1 - probability)) <= 4.5 * sigma
    assert_array_equal(device.dropout(x, probability, (3, 4)), y)
    out = x.copy()
    assert device.dropout(out, probability, (3, 4), out=out) is out
    assert_array_equal(out, y)
    # the mask is a function of the flat index alone, whatever the dtype and shape
    assert_array_equal(device.dropout(np.ones(1000), probability, (3, 4)) != 0, kept.reshape(-1)[:1000])


def test_masks_are_independent(device):
    n, p = 1_000_000, 0.5
    x = np.ones(n, np.float32)

    def signs(key):
        return device.dropout(x, p, key) - 1

    keys = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0x80000000, 0), (0, 0x80000000)]
    masks = [signs(key) for key in keys]
    bound = 5 / n**0.5
    for i, a in enumerate(masks):
        for lag in (1, 2, 4, 64, 512, 4096, 65536):
            assert abs(np.mean(a[lag:] * a[:-lag])) < bound * 1.1
        for b in masks[i + 1 :]:
            for lag in (0, 1, 2):
                assert abs(np.mean(a[lag:] * b[: n - lag])) < bound


def test_dropout_of_nothing_and_refusal(device):
    assert device.dropout(np.empty((0, 3)), 0.5, (0, 0)).shape == (0, 3)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="probability"):
            device.dropout(np.ones(3), wrong, (0, 0))


# -- optimizer and sums ----------------------------------------------------------------------


def test_adamw_follows_pytorch(device):
    golden = np.load(Path(__file__).with_name("adamw_golden.npz"))
    weight, m, v = golden["weight"].copy(), *np.zeros((2, golden["weight"].size), np.float32)
    for step, gradient in enumerate(golden["gradients"], start=1):
        half = 2 * gradient
        half.flags.writeable = False
        device.adamw(weight, half, m, v, **SETTINGS, step=step, gradient_scale=0.5)
        for got, name in ((weight, "weights"), (m, "moment1"), (v, "moment2")):
            assert_allclose(got, golden[name][step - 1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_in_float64(device, random, weight_decay):
    """Loshchilov, Hutter 2017, algorithm 2, a scalar at a time; several blocks long."""
    size, step, scale = 40_001, 7, 0.3
    w, g, m = random.standard_normal((3, size))
    v = random.random(size)
    lr, b1, b2, eps = 1e-2, 0.9, 0.99, 1e-6
    scaled = g * scale
    m2, v2 = b1 * m + (1 - b1) * scaled, b2 * v + (1 - b2) * scaled**2
    expected = w * (1 - lr * weight_decay) - lr * (m2 / (1 - b1**step)) / (np.sqrt(v2 / (1 - b2**step)) + eps)
    g.flags.writeable = False
    device.adamw(
        w, g, m, v, lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=weight_decay, step=step, gradient_scale=scale
    )
    for got, want in ((w, expected), (m, m2), (v, v2)):
        assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_adamw_of_nothing(device):
    nothing = np.empty(0, np.float32)
    device.adamw(nothing, nothing, nothing, nothing, **SETTINGS, step=1, gradient_scale=1.0)


@pytest.mark.parametrize("keep", [0.0, 1.0, 0.9])
@pytest.mark.parametrize("size", [0, 1, 100_003])
def test_blend(device, random, keep, size):
    out, x = random.standard_normal((2, size))
    expected = keep * out + 0.3 * x
    if keep == 0:
        out.fill(np.nan)  # not read
    x.flags.writeable = False
    device.blend(out, x, keep, 0.3)
    assert_allclose(out, expected, rtol=1e-14)
    device.blend(out, out, keep, 0.5)
    assert_allclose(out, (keep + 0.5) * expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 100_003])
def test_sum_of_squares(device, random, dtype, size):
    x = random.standard_normal(size).astype(dtype)
    rtol = 1e-6 if dtype == np.float32 else 1e-13
    assert_allclose(device.sum_of_squares(x), (x.astype(np.float64) ** 2).sum(), rtol=rtol)


def test_sum_of_squares_beyond_float32(device):
    for value in (1e30, 1e-30):
        assert_allclose(device.sum_of_squares(np.full(2, value, np.float32)), 2 * value**2, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("world, m", [(1, 5), (3, 100_001), (4, 0)])
def test_ordered_sum(device, random, accumulate, world, m):
    parts = random.standard_normal((world, m)).astype(np.float32)
    parts.flags.writeable = False
    before = random.standard_normal(m).astype(np.float32)
    out = before.copy() if accumulate else np.full(m, np.nan, np.float32)
    device.ordered_sum(parts, out, accumulate)
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part
    assert_array_equal(out, before + expected if accumulate else expected)


def test_ordered_sum_adds_in_the_precision_of_out(device):
    parts = np.array([[2048], [1], [1]], np.float16)  # float16 has no 2049
    out = np.empty(1, np.float32)
    device.ordered_sum(parts, out, accumulate=False)
    assert out[0] == 2050
