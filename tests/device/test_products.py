"""Compiled matrix products against float64: every set of instructions, bfloat16's too, in all ways that a matrix may lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.device import blas, c_library, compiled

missing = c_library.load() if isinstance(c_library.load(), str) else None
pytestmark = pytest.mark.skipif(missing is not None, reason=f"no compiled kernels: {missing}")
KINDS = ("plain", "avx2", "avx512", "bf16", "blas")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(blas, "threads", lambda: 1)


def product_device(kind):
    if kind == "blas":
        if blas.sgemm() is None:
            pytest.skip("this BLAS has no cblas_sgemm")
        return compiled.CompiledDevice(poison=True, chosen="plain")
    if kind not in c_library.all_instructions() and not (kind == "bf16" and c_library.multiplies_bf16()):
        pytest.skip(f"this processor has no {kind}")
    device = compiled.CompiledDevice(poison=True)
    device.products = kind
    return device


def matrix(random, rows, columns, turned, spare=0):
    """float32, row by row or column by column, maybe with unused elements between."""
    made = random.standard_normal((columns, rows + spare) if turned else (rows, columns + spare)).astype(np.float32)
    return made[:, :rows].T if turned else made[:, :columns]


def rounded(x, kind):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64) if kind == "bf16" else x.astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@given(m=st.integers(0, 40), n=st.integers(0, 80), k=st.integers(0, 40), turned=st.tuples(st.booleans(), st.booleans()),
       spare=st.integers(0, 3), more=st.sampled_from(["", "accumulate", "bias"]), seed=st.integers(0, 99))
def test_any_shape(kind, m, n, k, turned, spare, more, seed):
    random, device = np.random.default_rng(seed), product_device(kind)
    a, b = matrix(random, m, k, turned[0], spare), matrix(random, k, n, turned[1], spare)
    whole = random.standard_normal((m, n + spare)).astype(np.float32)
    out, before = whole[:, :n], whole.copy()
    bias = random.standard_normal(n).astype(np.float32)
    device.matmul(a, b, out, more == "accumulate", bias if more == "bias" else None)
    expected = rounded(a, kind) @ rounded(b, kind) + {"": 0, "accumulate": before[:, :n], "bias": bias}[more]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(whole[:, n:], before[:, n:])  # nothing else is written
    np.testing.assert_array_equal(device.matmul(a, b), device.matmul(a, b, device.empty((m, n), np.float32)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(100, 2100, 530), (97, 33, 1025), (200, 4200, 3)])
def test_more_than_one_block(kind, m, n, k):
    random, device = np.random.default_rng(0), product_device(kind)
    a, b = matrix(random, m, k, False), matrix(random, k, n, True)
    np.testing.assert_allclose(device.matmul(a, b), rounded(a, kind) @ rounded(b, kind), rtol=0, atol=2e-6 * k**0.5 * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows(kind):
    device = product_device(kind)
    for wrong in (np.nan, np.inf, np.array(0xFFFFFFFF, np.uint32).view(np.float32)):
        a, b = np.ones((5, 7), np.float32), np.ones((7, 6), np.float32)
        a[2, 3] = wrong
        found = device.matmul(a, b)
        assert np.isfinite(np.delete(found, 2, axis=0)).all() and not np.isfinite(found[2]).any()


@pytest.mark.parametrize("kind", ["plain", "blas"])
def test_what_stays_with_numpy(monkeypatch, kind):
    device = product_device(kind)
    called = []
    monkeypatch.setattr(device, "run", lambda name, *args, **options: called.append(name))
    one, wide = np.ones((4, 4), np.float32), np.ones((4, 4))
    device.matmul(wide, wide)
    device.matmul(np.ones((4, 8), np.float32)[:, ::2], one)  # neither rows nor columns lie together
    monkeypatch.setattr(blas, "threads", lambda: 2)
    device.matmul(one, one)
    assert not called
