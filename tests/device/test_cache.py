"""Attention over kept keys and values equals attention over the whole sequence, which `test_attention` proves."""

from __future__ import annotations

import numpy as np
import pytest

from mpshard.device import open_device

HEADS, KV_HEADS, WIDTH, LENGTH = 6, 2, 4, 23


@pytest.mark.parametrize("parts", [[23], [1] * 23, [7, 1, 1, 9, 5], [22, 1]], ids=str)
@pytest.mark.parametrize("size", [1.0, 40.0], ids=["", "large scores"])
def test_in_parts_as_at_once(parts, size):
    device = open_device("numpy", poison=True)
    qkv = size * np.random.default_rng(0).standard_normal((2, LENGTH, (HEADS + 2 * KV_HEADS) * WIDTH))
    expected, _ = device.attention(qkv, HEADS, KV_HEADS, 0.5)
    cache = device.empty((2, LENGTH + 3, 2 * KV_HEADS * WIDTH), qkv.dtype)
    past = 0
    for t in parts:
        part = np.ascontiguousarray(qkv[:, past:past + t])
        y = device.cached_attention(part, cache, past, HEADS, KV_HEADS, 0.5)
        np.testing.assert_allclose(y, expected[:, past:past + t], rtol=1e-10, atol=1e-12)
        past += t
    np.testing.assert_array_equal(cache[:, :LENGTH], qkv[..., HEADS * WIDTH:])
    assert np.isnan(cache[:, LENGTH:]).all()  # not touched, and not read
