"""Linear layers whose products round their inputs to 8 bits: which of their products round what, to which format."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mpshard.autograd import Parameter, Tape, Tensor, ops
from mpshard.autograd.tensor import Adapter
from mpshard.device import open_device
from tests.device.reference import fp8

B, T, I, O = 2, 5, 6, 8  # noqa: E741
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def parameter(random, name, *shape, fused=()):
    made = Parameter.fuse(name, fused) if fused else Parameter(name, shape)
    made.bind(random.standard_normal(shape).astype(np.float32))
    made.bind_grad(np.full(shape, np.nan, np.float32))
    return made


@pytest.fixture
def tape():
    return Tape(open_device("numpy", poison=True), fp8=True)


@pytest.fixture
def x(random):
    return random.standard_normal((B, T, I)).astype(np.float32)


@pytest.fixture
def dy(random):
    return random.standard_normal((B, T, O)).astype(np.float32)


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.mark.parametrize("transposed", [False, True])
def test_each_product(tape, random, x, dy, transposed):
    w, b = parameter(random, "w", *((I, O) if transposed else (O, I))), parameter(random, "b", O)
    tensor = Tensor(x)
    y = ops.linear(tape, tensor, w, b, transposed)
    matrix, inputs, slopes = w.data if transposed else w.data.T, x.reshape(-1, I), dy.reshape(-1, O)  # (i, o), (n, i), (n, o)
    assert_allclose(y.data.reshape(-1, O), fp8(inputs, False) @ fp8(matrix, False) + b.data, **NEAR)
    tape.backward(y, dy)
    assert_allclose(tensor.grad.reshape(-1, I), fp8(slopes, True) @ fp8(matrix, False).T, **NEAR)
    gradient = fp8(inputs, False).T @ fp8(slopes, True)
    assert_allclose(w.grad, gradient if transposed else gradient.T, **NEAR)
    assert_allclose(b.grad, slopes.sum(0), **NEAR)  # which is no product
    y = ops.linear(tape, tensor, w, b, transposed)
    tape.backward(y, dy)
    assert_allclose(w.grad, 2 * (gradient if transposed else gradient.T), **NEAR)


def test_parts_that_lie_apart_are_rounded_by_themselves_in_backward(tape, random, x, dy):
    """Forward joins them: one scale for all. Backward has a product for each."""
    parts = [parameter(random, "w0", 2, I), parameter(random, "w1", O - 2, I)]
    parts[1].data[...] *= 100
    whole = Parameter.fuse("w", parts)
    whole.apart = True
    y = ops.linear(tape, Tensor(x), whole)
    joined, inputs, slopes = np.concatenate([part.data for part in parts]), x.reshape(-1, I), dy.reshape(-1, O)
    assert_allclose(y.data.reshape(-1, O), fp8(inputs, False) @ fp8(joined, False).T, rtol=1e-5, atol=1e-4)
    tape.backward(y, dy)
    for part, place in zip(parts, (slice(0, 2), slice(2, O)), strict=True):
        assert_allclose(part.grad, fp8(slopes[:, place], True).T @ fp8(inputs, False), **NEAR)


def test_adapters_and_logits_stay_as_they_are(tape, random, x):
    w = parameter(random, "w", O, I)
    alone = ops.linear(tape, Tensor(x), w).data.copy()
    a, b = parameter(random, "a", 2, I), parameter(random, "b", O, 2)
    w.adapter = Adapter(a, b, 0.5, 0.0)
    assert_allclose(ops.linear(tape, Tensor(x), w).data - alone, 0.5 * x @ a.data.T @ b.data.T, rtol=1e-4, atol=1e-5)
    assert_allclose(ops.logits(tape, Tensor(x), w).data, x @ w.data.T, **NEAR)


def test_without_it_nothing_is_rounded(random, x, dy):
    tape, w, tensor = Tape(open_device("numpy", poison=True)), parameter(random, "w", O, I), Tensor(x)
    y = ops.linear(tape, tensor, w)
    tape.backward(y, dy)
    assert_allclose(y.data, x @ w.data.T, **NEAR)
    assert_allclose(tensor.grad, dy @ w.data, **NEAR)
    assert_allclose(w.grad, dy.reshape(-1, O).T @ x.reshape(-1, I), **NEAR)
