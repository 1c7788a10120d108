"""Cross-entropy fused with the projection, against the whole matrix of logits in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mpshard.device import numpy_loss

from . import reference
from .reference import slope

IGNORE = -100
CASES = [  # n, d, v, share of valid tokens
    (1, 1, 1, 1.0),
    (7, 5, 3, 1.0),
    (40, 6, 101, 0.5),
    (40, 6, 101, 0.0),
    (90, 26, 101, 1.0),
    (0, 4, 5, 1.0),
]


@pytest.fixture(params=[8 << 20, 4000], ids=["one chunk", "many chunks"])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(numpy_loss, "CHUNK_BYTES", request.param)


def make(random, n, d, v, share):
    targets = random.integers(0, v, n)
    targets[random.random(n) >= share] = IGNORE
    return random.standard_normal((n, d)), random.standard_normal((v, d)), targets


@pytest.mark.parametrize("case", CASES)
def test_cross_entropy(device, random, chunk_bytes, case):
    x, table, targets = make(random, *case)
    scale = 0.37
    dtable = np.full_like(table, np.nan)
    value, dx = device.cross_entropy(x, table, targets, IGNORE, scale, dtable, False, True)
    assert isinstance(value, float)
    assert_allclose(value, reference.cross_entropy(x, table, targets, IGNORE), rtol=1e-12, atol=1e-12)
    for array, gradient in ((x, dx), (table, dtable)):
        direction = random.standard_normal(array.shape)
        numeric = scale * slope(lambda: reference.cross_entropy(x, table, targets, IGNORE), array, direction)
        assert_allclose((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-8)
    assert not dx[targets == IGNORE].any()

    more = random.standard_normal(table.shape)
    both = more.copy()
    device.cross_entropy(x, table, targets, IGNORE, scale, both, True, False)
    assert_allclose(both, more + dtable, rtol=1e-11, atol=1e-12)
    assert device.cross_entropy(x, table, targets, IGNORE, scale, None, False, False) == (value, None)

    x32, table32, dtable32 = x.astype(np.float32), table.astype(np.float32), np.empty(table.shape, np.float32)
    x32.flags.writeable = table32.flags.writeable = targets.flags.writeable = False
    value32, dx32 = device.cross_entropy(x32, table32, targets, IGNORE, scale, dtable32, False, True)
    assert dx32.dtype == np.float32
    assert_allclose(value32, value, rtol=1e-5, atol=1e-6)
    assert_allclose(dx32, dx, rtol=1e-4, atol=1e-5)
    assert_allclose(dtable32, dtable, rtol=1e-4, atol=1e-4)


def test_ignored_tokens_may_hold_anything(device, random, chunk_bytes):
    x, table, targets = make(random, 60, 6, 101, 0.5)
    expected = device.cross_entropy(x, table, targets, IGNORE, 1.0, None, False, True)
    x[targets == IGNORE] = np.nan
    value, dx = device.cross_entropy(x, table, targets, IGNORE, 1.0, None, False, True)
    assert value == expected[0]
    assert_allclose(dx, expected[1])


def test_large_logits(device):
    x, table = np.array([[1.0]], np.float32), np.array([[1e4], [-1e4], [0.0]], np.float32)
    assert device.cross_entropy(x, table, np.array([0]), IGNORE, 1.0, None, False, False)[0] == 0
    assert device.cross_entropy(x, table, np.array([1]), IGNORE, 1.0, None, False, False)[0] == 2e4


def test_targets_outside_the_vocabulary_are_refused(device):
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="vocabulary of 3"):
            device.cross_entropy(np.ones((1, 2)), np.ones((3, 2)), np.array([wrong]), IGNORE, 1.0, None, False, False)


def test_no_matrix_of_tokens_times_vocabulary(device, random):
    n, d, v = 9000, 2, 6000
    x, table = (random.standard_normal(shape).astype(np.float32) for shape in ((n, d), (v, d)))
    device.cross_entropy(x, table, random.integers(0, v, n), IGNORE, 1.0, np.empty_like(table), False, True)
    assert device.memory.peak() < n * v * 4 / 5


def test_chunks_are_even_and_tall_enough():
    """As many tokens as fit the bytes, but of a large table at least 256; never a last chunk of a few."""
    sizes = {(2048, 8192, 512): 512, (512, 49152, 576): 256, (514, 49152, 576): 172, (5, 49152, 576): 5, (0, 49152, 576): 0,
             (4096, 1 << 20, 64): 32}  # of a table with short rows no more than half of it
    assert {case: numpy_loss.chunk_tokens(*case, itemsize=4) for case in sizes} == sizes
