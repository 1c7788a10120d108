"""Attention against the full t x t matrix in float64, gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from mpshard.device import numpy_attention
from mpshard.device.numpy_device import NumpyDevice

from . import reference
from .reference import slope

SHAPES = [  # b, t, h, k, e
    (1, 1, 1, 1, 1),
    (2, 7, 4, 2, 3),
    (1, 65, 1, 1, 5),
    (2, 200, 6, 2, 8),
    (1, 500, 9, 3, 4),
    (3, 33, 4, 1, 16),
    # Compiled kernels, of whole vectors: blocks of 64 that are full, one more and one less, in groups and not.
    (1, 64, 1, 1, 64),
    (2, 129, 2, 2, 48),
    (1, 255, 6, 2, 16),
    (1, 200, 2, 1, 128),
]


def make(random, b, t, h, k, e, spread=1.0):
    return random.standard_normal((b, t, (h + 2 * k) * e)) * spread, random.standard_normal((b, t, h * e))


def packed(random, b, t, documents):
    return np.sort(random.integers(0, documents, (b, t)), axis=1).astype(np.int32)


@pytest.mark.parametrize("spread", [1.0, 8.0])  # at 8 scores leave the range in which no maximum is needed
@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(device, random, shape, with_segments, spread):
    b, t, h, k, e = shape
    qkv, dy = make(random, *shape, spread)
    segments = packed(random, b, t, 5) if with_segments else None
    scale = e**-0.5
    y, lse = device.attention(qkv, h, k, scale, segments)
    expected_y, expected_lse = reference.attention(qkv, h, k, scale, segments)
    assert_allclose(y, expected_y, rtol=1e-9, atol=1e-11)
    assert_allclose(lse, expected_lse, rtol=1e-11, atol=1e-12)
    dqkv = device.attention_backward(dy, qkv, y, lse, h, k, scale, segments)
    for part in (slice(0, h * e), slice(h * e, (h + k) * e), slice((h + k) * e, None)):
        direction = np.zeros_like(qkv)
        direction[..., part] = random.standard_normal(direction[..., part].shape)
        numeric = slope(lambda: float((dy * reference.attention(qkv, h, k, scale, segments)[0]).sum()), qkv, direction)
        assert_allclose((dqkv * direction).sum(), numeric, rtol=1e-6, atol=1e-6 * spread)

    single, dy32 = qkv.astype(np.float32), dy.astype(np.float32)
    single.flags.writeable = dy32.flags.writeable = False
    y32, lse32 = device.attention(single, h, k, scale, segments)
    y32.flags.writeable = lse32.flags.writeable = False
    dqkv32 = device.attention_backward(dy32, single, y32, lse32, h, k, scale, segments)
    assert y32.dtype == lse32.dtype == dqkv32.dtype == np.float32
    tolerance = 1e-5 * spread**2
    assert_allclose(y32, y, rtol=0, atol=tolerance)
    assert_allclose(dqkv32, dqkv, rtol=0, atol=tolerance * max(1, np.abs(dqkv).max()))


@settings(max_examples=30, deadline=None)
@given(
    b=st.integers(1, 2), t=st.integers(1, 40), k=st.integers(1, 3), g=st.integers(1, 3), e=st.integers(1, 6),
    queries=st.integers(1, 16), score_bytes=st.integers(1, 20_000), seed=st.integers(0, 100),
    documents=st.integers(0, 4),
)  # fmt: skip
def test_any_cut_gives_the_same(b, t, k, g, e, queries, score_bytes, seed, documents):
    random = np.random.default_rng(seed)
    h = k * g
    qkv, dy = make(random, b, t, h, k, e)
    # ids in no order: a document in two pieces, which still see each other
    segments = random.integers(0, documents, (b, t)).astype(np.int32) if documents else None
    whole = NumpyDevice()
    y, lse = whole.attention(qkv, h, k, 0.5, segments)
    expected = reference.attention(qkv, h, k, 0.5, segments)
    dqkv = whole.attention_backward(dy, qkv, y, lse, h, k, 0.5, segments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_attention, "QUERIES", queries)
        patch.setattr(numpy_attention, "SCORE_BYTES", score_bytes)
        cut = NumpyDevice(poison=True)
        y_cut, lse_cut = cut.attention(qkv, h, k, 0.5, segments)
        dqkv_cut = cut.attention_backward(dy, qkv, y, lse, h, k, 0.5, segments)
    for got, want in ((y, expected[0]), (lse, expected[1]), (y_cut, y), (lse_cut, lse), (dqkv_cut, dqkv)):
        assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_scores_far_from_zero(device, shift):
    """Every score of a row moved by as much: the softmax must not notice, although exp of it does not exist."""
    random = np.random.default_rng(0)
    qkv, dy = make(random, 1, 150, 1, 1, 4)
    plain = device.attention(qkv, 1, 1, 1.0)
    gradient = device.attention_backward(dy, qkv, *plain, 1, 1, 1.0)
    moved = np.concatenate([qkv[..., :4], np.ones((1, 150, 1)), qkv[..., 4:8], np.full((1, 150, 1), shift)], axis=-1)
    moved = np.concatenate([moved, qkv[..., 8:], np.zeros((1, 150, 1))], axis=-1)
    y, lse = device.attention(moved, 1, 1, 1.0)
    assert_allclose(y[..., :4], plain[0], rtol=1e-9)
    assert_allclose(lse, plain[1] + shift, rtol=1e-12)
    dy_wide = np.concatenate([dy, np.zeros((1, 150, 1))], axis=-1)
    dmoved = device.attention_backward(dy_wide, moved, y, lse, 1, 1, 1.0)
    kept = [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert_allclose(dmoved[..., kept], gradient, rtol=1e-8, atol=1e-9)


def test_a_late_key_far_above_the_rest(device):
    """A running maximum that rises between blocks: earlier sums are rescaled, in both directions of the walk."""
    random = np.random.default_rng(1)
    for where in (0, 100, 299):
        qkv, _ = make(random, 1, 300, 1, 1, 4)
        qkv[0, :, 0] = 1
        qkv[0, where, 4] = 300
        y, lse = device.attention(qkv, 1, 1, 1.0)
        expected = reference.attention(qkv, 1, 1, 1.0)
        assert_allclose(y, expected[0], rtol=1e-9, atol=1e-12)
        assert_allclose(lse, expected[1], rtol=1e-11)


def test_short_numbers_reach_as_far(device):
    """The same two in float32: of whole vectors, so that the compiled kernels take part."""
    random, e = np.random.default_rng(2), 16
    for where, height in ((0, 100), (100, 100), (299, 100), (250, -100)):
        qkv, dy = make(random, 1, 300, 1, 1, e)
        qkv[0, :, 0] = 1
        qkv[0, where, e] = height
        if height < 0:
            qkv[0, :, e] = height  # no score near zero
        single = qkv.astype(np.float32)
        y, lse = device.attention(single, 1, 1, 1.0)
        expected = reference.attention(single.astype(np.float64), 1, 1, 1.0)
        assert_allclose(y, expected[0], rtol=0, atol=1e-4)
        assert_allclose(lse, expected[1], rtol=1e-6, atol=1e-4)
        dqkv = device.attention_backward(dy.astype(np.float32), single, y, lse, 1, 1, 1.0)
        whole = device.attention_backward(dy, qkv, *expected, 1, 1, 1.0)
        assert_allclose(dqkv, whole, rtol=0, atol=3e-4 * np.abs(whole).max())


def test_memory_grows_linearly_with_the_sequence(device, random):
    peaks = []
    for t in (1024, 2048, 4096):
        qkv, dy = (a.astype(np.float32) for a in make(random, 1, t, 2, 1, 8))
        device.memory.reset_peak()
        y, lse = device.attention(qkv, 2, 1, 0.3)
        device.attention_backward(dy, qkv, y, lse, 2, 1, 0.3)
        peaks.append(device.memory.peak())
        del y, lse
    assert peaks[2] - peaks[1] <= 2.1 * (peaks[1] - peaks[0])
