"""cuDNN's attention and cuBLASLt's products on stand-ins for them: the right numbers from what is described, and left alone where
they are not installed, have no plan, cannot be used or compute something else."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mpshard as mps
from mpshard.config import ConfigError
from mpshard.device import gpu_libraries, open_device
from mpshard.device.numpy_device import NumpyDevice
from mpshard.shard.precision import Precision
from tests.device import cuda_on_cpu, lazy_cupy, lazy_nvidia
from tests.device.lazy_nvidia import calls
from tests.device.reference import fp8

pytestmark = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
NAMES = json.loads(Path(__file__).with_name("nvidia_names.json").read_text())
EXACT = NumpyDevice()
HALF, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("module", ["cudnn", "nvmath.bindings.cublasLt"])
def test_every_name_and_argument_is_real(module):
    for name, ours in lazy_nvidia.MODULES[module].items():
        real = NAMES[module][name]
        if inspect.isfunction(ours):
            assert list(inspect.signature(ours).parameters) == real["arguments"], name
        elif name == "pygraph":
            assert set(inspect.signature(ours).parameters) <= set(real["arguments"])
        for member in [m for m in vars(ours) if not m.startswith("_") and m not in ("at", "run")]:
            assert member in real["members"], f"{name}.{member}"
            if inspect.isfunction(vars(ours)[member]):
                assert set(list(inspect.signature(vars(ours)[member]).parameters)[1:]) <= set(real["members"][member]), f"{name}.{member}"


@pytest.fixture(scope="module")
def plain():
    """A device on the stand-ins that uses no library yet."""
    with lazy_cupy.installed(), lazy_nvidia.installed():
        yield open_device("cupy", poison=True)


@pytest.fixture(scope="module")
def libraries(plain):
    assert gpu_libraries(plain, list) == []
    found = plain.attention_library, plain.product_library, plain.fp8_library
    without(plain)
    return found


@pytest.fixture
def device(plain, libraries):
    plain.attention_library, plain.product_library, plain.fp8_library = libraries
    calls.clear()
    yield plain
    without(plain)


def without(device):
    device.attention_library = device.product_library = device.fp8_library = None


def values(device, dtype, *shape):
    """On the device, and in float64 on the host."""
    host = np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)
    return device.from_host(host), host.astype(np.float64)


def matrix(device, dtype, rows, columns, turned):
    x, x64 = values(device, dtype, *((columns, rows) if turned else (rows, columns)))
    return (x.T, x64.T) if turned else (x, x64)


def close(device, got, expected, dtype):
    host = device.to_host(got)
    assert host.dtype == dtype and host.shape == expected.shape
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert_allclose(host.astype(np.float64), expected, rtol=0, atol=4 * unit * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("b, t, h, k, e", [(1, 1, 1, 1, 8), (2, 33, 6, 2, 24), (1, 70, 4, 4, 16)])
def test_attention(device, dtype, b, t, h, k, e):
    (qkv, qkv64), (dy, dy64), scale = values(device, dtype, b, t, (h + 2 * k) * e), values(device, dtype, b, t, h * e), e**-0.5
    for _ in range(2):  # the second time with the plan of the first
        y, lse = device.attention(qkv, h, k, scale)
        dqkv = device.attention_backward(dy, qkv, y, lse, h, k, scale)
    assert calls == ["attention", "attention_backward"] * 2
    y64, lse64 = EXACT.attention(qkv64, h, k, scale)
    close(device, y, y64, dtype)
    close(device, lse, lse64, np.dtype(np.float32))
    close(device, dqkv, EXACT.attention_backward(dy64, qkv64, y64, lse64, h, k, scale), dtype)


@pytest.mark.parametrize("why", ["width", "type", "segments", "too wide"])
def test_attention_without_a_plan_is_the_own_kernels(device, monkeypatch, why):
    dtype, e = np.dtype(np.float32) if why == "type" else HALF, 12 if why == "width" else 16
    if why == "too wide":
        monkeypatch.setattr(lazy_nvidia, "WIDEST", 8)
        device.attention_library._plans.clear()
    (qkv, qkv64), (dy, dy64) = values(device, dtype, 1, 9, 3 * e), values(device, dtype, 1, 9, e)
    segments = np.sort(np.arange(9, dtype=np.int32) % 3)[None] if why == "segments" else None
    on_gpu = None if segments is None else device.from_host(segments)
    y, lse = device.attention(qkv, 1, 1, 0.25, on_gpu)
    dqkv = device.attention_backward(dy, qkv, y, lse, 1, 1, 0.25, on_gpu)
    assert calls == []
    y64, lse64 = EXACT.attention(qkv64, 1, 1, 0.25, segments)
    close(device, y, y64, dtype)
    close(device, dqkv, EXACT.attention_backward(dy64, qkv64, y64, lse64, 1, 1, 0.25, segments), dtype)


@pytest.mark.parametrize("first", ["library", "own"])
def test_either_runs_backward_after_the_other(device, first):
    (qkv, qkv64), (dy, dy64), library = values(device, BF16, 1, 40, 64), values(device, BF16, 1, 40, 32), device.attention_library
    device.attention_library = library if first == "library" else None
    y, lse = device.attention(qkv, 2, 1, 0.25)
    device.attention_library = None if first == "library" else library
    dqkv = device.attention_backward(dy, qkv, y, lse, 2, 1, 0.25)
    assert len(calls) == 1
    y64, lse64 = EXACT.attention(qkv64, 2, 1, 0.25)
    close(device, dqkv, EXACT.attention_backward(dy64, qkv64, y64, lse64, 2, 1, 0.25), BF16)


@pytest.mark.parametrize("dtype", [HALF, BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_with_a_bias(device, dtype, turned):
    m, k, n = 5, 16, 24
    a, a64 = matrix(device, dtype, m, k, turned[0])
    b, b64 = matrix(device, dtype, k, n, turned[1])
    bias, bias64 = values(device, dtype, n)
    close(device, device.matmul(a, b, bias=bias), a64 @ b64 + bias64, dtype)
    out = device.empty((m, n), dtype)
    assert device.matmul(a, b, out, bias=bias) is out
    close(device, out, a64 @ b64 + bias64, dtype)
    assert calls == ["product with a bias"] * 2


def test_products_that_are_not_for_the_library(device):
    (a, a64), (b, b64), (bias, bias64) = values(device, HALF, 8, 16), values(device, HALF, 16, 8), values(device, HALF, 9)
    close(device, device.matmul(a, b, bias=bias[1:]), a64 @ b64 + bias64[1:], HALF)  # not where the library may read it
    out, before = values(device, HALF, 8, 8)
    device.matmul(a, b, out, accumulate=True, bias=bias[:8])
    close(device, out, before + a64 @ b64 + bias64[:8], HALF)
    assert_array_equal(device.to_host(device.matmul(a[:, :0], b[:0], bias=bias[:8])), np.tile(bias64[:8].astype(HALF), (8, 1)))
    assert calls == []


# -- 8 bits ----------------------------------------------------------------------------------
def fp8_product(device, dtype, m, k, n, turned, gradients, bias=None, out=None, accumulate=False):
    """By the device, and in float64 of the inputs that ml_dtypes rounds."""
    a, b = matrix(device, dtype, m, k, turned[0]), matrix(device, dtype, k, n, turned[1])
    expected = fp8(a[1], gradients[0]) @ fp8(b[1], gradients[1])
    return device.matmul_fp8(a[0], b[0], gradients, out, accumulate, bias), expected


@pytest.mark.parametrize("dtype", [HALF, BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("gradients", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_8_bits(device, dtype, turned, gradients):
    m, k, n = 6 if not turned[0] else 32, 48, 16
    bias, bias64 = values(device, dtype, n)
    found, expected = fp8_product(device, dtype, m, k, n, turned, gradients)
    close(device, found, expected, dtype)
    found, expected = fp8_product(device, dtype, m, k, n, turned, gradients, bias)
    close(device, found, expected + bias64, dtype)
    out, before = values(device, np.float32, m, n)
    found, expected = fp8_product(device, dtype, m, k, n, turned, gradients, out=out, accumulate=True)
    assert found is out
    close(device, out, expected + before, np.dtype(np.float32))
    with_bias = "product of 8 bits" + (" with a bias" if dtype.itemsize == 2 else "")  # of float32 it has none that is not bfloat16
    assert calls == ["product of 8 bits", with_bias, "product of 8 bits"]


@pytest.mark.parametrize("why", ["k", "n", "nothing", "two gradients", "address", "old"])
def test_products_of_8_bits_that_are_not_for_the_library(device, monkeypatch, why):
    """They are made of the same rounded numbers."""
    m, k, n = 8, 40 if why == "k" else 0 if why == "nothing" else 48, 24 if why == "n" else 16
    gradients = (True, why == "two gradients")
    out = device.zeros(m * n + 1, HALF)[1:].reshape(m, n) if why == "address" else None
    if why == "old":
        monkeypatch.setattr(lazy_nvidia, "CAPABILITY", 80)
        device.fp8_library._known.clear()
    found, expected = fp8_product(device, HALF, m, k, n, (False, True), gradients, out=out)
    close(device, found, expected, HALF)
    assert calls == []
    device.fp8_library._known.clear()


def test_what_is_not_finite_shows_in_products_of_8_bits(device):
    host = np.ones((16, 16), HALF)
    host[3, 4] = np.inf
    found = device.matmul_fp8(device.from_host(host), device.from_host(np.ones((16, 16), HALF)))
    assert np.isnan(device.to_host(found)).all() and calls == ["product of 8 bits"]


@pytest.mark.parametrize(("wrong", "reason"), [
    ("old", "cuBLASLt 0 has no products of 8 bits on this GPU"), ("scale", "cuBLASLt 0 computes something else here: "),
    ("formats", "cuBLASLt 0 computes something else here: ")])
def test_products_of_8_bits_that_are_not_right_are_left_alone(plain, monkeypatch, wrong, reason):
    if wrong == "old":
        monkeypatch.setattr(lazy_nvidia, "CAPABILITY", 80)
    elif wrong == "scale":  # not read
        monkeypatch.setattr(lazy_nvidia, "SCALES", lazy_nvidia.SCALES[:1])
    else:
        monkeypatch.setitem(lazy_nvidia.FP8, 29, ml_dtypes.float8_e4m3fn)
    (found,) = gpu_libraries(plain, list)
    assert found.startswith(reason) and "\n" not in found
    assert plain.fp8_library is None and plain.product_library is not None and plain.fp8_products == "by rounding alone"
    without(plain)


# -- which are taken -------------------------------------------------------------------------
def test_what_is_not_installed_is_said(plain, monkeypatch):
    cupy_libraries = import_module("mpshard.device.cupy_libraries")  # not the package's attribute, which may be an earlier one

    monkeypatch.setattr(cupy_libraries, "find_spec", lambda name: None)
    assert gpu_libraries(plain, list) == ["nvidia-cudnn-frontend is not installed", "nvmath-python is not installed"]
    assert plain.attention_library is plain.product_library is plain.fp8_library is None


@pytest.mark.parametrize("wrong", ["scale", "lse", "raises", "no plan"])
def test_a_library_that_is_not_right_is_left_alone(plain, monkeypatch, wrong):
    forward = lazy_nvidia._forward

    def planted(at, q, k, v, y, lse, scale):
        forward(at, q, k, v, y, lse, scale * (1.5 if wrong == "scale" else 1))
        if wrong == "lse":
            at[lse][...] *= 1.4427  # base 2

    monkeypatch.setattr(lazy_nvidia, "_forward", planted)
    if wrong == "raises":
        monkeypatch.setattr("cudnn.create_handle", lambda: 1 / 0)
    if wrong == "no plan":
        monkeypatch.setattr(lazy_nvidia.pygraph, "build", lambda *args: (_ for _ in ()).throw(lazy_nvidia.cudnnGraphNotSupportedError()))
    (reason,) = gpu_libraries(plain, list)
    assert {"scale": "computes something else", "lse": "computes something else", "raises": "ZeroDivisionError division by zero",
            "no plan": "has no attention for 128 positions"}[wrong] in reason
    assert plain.attention_library is None and plain.product_library is not None and "\n" not in reason
    without(plain)


def test_only_what_all_ranks_have_is_taken(plain):
    assert gpu_libraries(plain, lambda here: [False, here[1], False]) == []
    assert plain.attention_library is plain.fp8_library is None and plain.product_library is not None
    without(plain)


@pytest.mark.parametrize("kernels", ["auto", "cuda"])
def test_training_with_them(plain, kernels):
    """Losses are those of the own kernels to bfloat16's rounding, and the libraries were asked."""
    config = mps.GPT2Config(vocab_size=61, max_seq_len=16, n_layers=2, d_model=32, n_heads=2, dropout=0.0)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 2, 17))
    calls.clear()
    losses = []
    for chosen in (kernels, "cuda"):
        sharded = mps.shard(mps.models.gpt2(config), device="cupy", precision=Precision(param="bf16"), kernels=chosen)
        optim = mps.AdamW(sharded, lr=1e-2)
        for _ in range(3):
            output = sharded.step((tokens[..., :-1], tokens[..., 1:]))
            optim.step(output)
            losses.append(output.loss)
        sharded.close()
    assert_allclose(losses[:3], losses[3:], rtol=5e-3)
    forward = 2 * 3 if kernels == "auto" else 0  # layers x steps
    asked = [calls.count(name) for name in ("attention", "attention_backward", "product with a bias")]
    assert [n - (1 if kernels == "auto" else 0) for n in asked] == [forward, forward, 4 * forward]  # once each to try them


@pytest.mark.parametrize(("device", "kernels", "remedy"), [("cupy", "numpy", "auto or cuda"), ("numpy", "cuda", "auto, numpy or compiled")])
def test_kernels_of_the_other_device(plain, device, kernels, remedy):
    with pytest.raises(ConfigError, match=f"run.kernels={kernels} is of a .*{remedy}"):
        mps.shard(mps.models.gpt2(mps.GPT2Config(vocab_size=8, max_seq_len=4, n_layers=1, d_model=8, n_heads=1)), device=device,
                  kernels=kernels)
