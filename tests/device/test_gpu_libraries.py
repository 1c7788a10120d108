"""cuDNN's attention and cuBLASLt's products on stand-ins for them: the right numbers from what is described, and left alone where
they are not installed, have no plan, cannot be used or compute something else."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from importlib import import_module
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import mpshard as mps
from mpshard.autograd import Parameter, Tape, Tensor, ops
from mpshard.autograd.tensor import Adapter
from mpshard.config import ConfigError
from mpshard.device import gpu_libraries, open_device
from mpshard.device.numpy_device import NumpyDevice
from mpshard.shard.precision import Precision
from tests import golden
from tests.device import cuda_on_cpu, lazy_cupy, lazy_nvidia
from tests.device.lazy_nvidia import calls
from tests.device.reference import fp8
from tests.models_small import deal, golden_sharded

pytestmark = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
NAMES = json.loads(Path(__file__).with_name("nvidia_names.json").read_text())
EXACT = NumpyDevice()
HALF, BF16, SINGLE = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
LIBRARIES = "attention_library", "product_library", "epilogues", "fp8_library"


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
    found = {name: getattr(plain, name) for name in LIBRARIES}
    without(plain)
    return found


@pytest.fixture
def device(plain, libraries):
    for name, library in libraries.items():
        setattr(plain, name, library)
    calls.clear()
    yield plain
    without(plain)


def without(device):
    for name in LIBRARIES:
        setattr(device, name, None)


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


# -- GELU and bias gradients -----------------------------------------------------------------
EACH_WAY = pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
OF_EACH_TYPE = pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)


@pytest.fixture
def exactly(plain, monkeypatch):
    """GELUs of float32 are for the library too, so that what they compute can be told from rounding."""
    monkeypatch.setattr(import_module("mpshard.device.cupy_cublaslt"), "GELU_TYPES", ("float16", "float32"))


@OF_EACH_TYPE
@EACH_WAY
@pytest.mark.parametrize("keep", [True, False])
def test_products_with_a_gelu(device, dtype, turned, keep):
    m, k, n = 5, 16, 24
    a, a64 = matrix(device, dtype, m, k, turned[0])
    b, b64 = matrix(device, dtype, k, n, turned[1])
    bias, bias64 = values(device, dtype, n)
    y, before = device.epilogues.gelu(a, b, bias, keep)
    before64 = a64 @ b64 + bias64
    close(device, y, EXACT.gelu(before64, True), dtype)
    assert (before is not None) == keep
    if keep:
        close(device, before, before64, dtype)
    assert calls == ["product with a bias and GELU" + (", both kept" if keep else "")]


@OF_EACH_TYPE
@EACH_WAY
def test_products_with_the_derivative_of_a_gelu(device, dtype, turned):
    m, k, n = 5, 16, 24
    dy, dy64 = matrix(device, dtype, m, k, turned[0])
    b, b64 = matrix(device, dtype, k, n, turned[1])
    x, x64 = values(device, dtype, m, n)
    close(device, device.epilogues.gelu_backward(dy, b, x), EXACT.gelu_backward(dy64 @ b64, x64, True), dtype)
    assert calls == ["product with GELU's derivative"]


@pytest.mark.parametrize(("dtype", "to"), [(HALF, HALF), (BF16, BF16), (SINGLE, SINGLE), (HALF, SINGLE), (BF16, SINGLE)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_a_bias_gradient(device, dtype, to, transposed):
    """What was there is overwritten: it is NaN."""
    n, i, o = 12, 16, 24
    (dy, dy64), (x, x64) = values(device, dtype, n, o), values(device, dtype, n, i)
    weight, bias = device.empty((i, o) if transposed else (o, i), to), device.empty(o, to)
    assert device.epilogues.linear_gradients(dy, x, weight, bias, transposed)
    close(device, weight, x64.T @ dy64 if transposed else dy64.T @ x64, to)
    close(device, bias, dy64.sum(0), to)
    assert calls == ["product with a bias gradient"]


def test_only_products_with_a_gelu_are_of_one_row(device):
    """As sampling has them."""
    (a, a64), (b, b64), (bias, bias64) = values(device, HALF, 1, 16), values(device, HALF, 16, 8), values(device, HALF, 8)
    y, _ = device.epilogues.gelu(a, b, bias, False)
    close(device, y, EXACT.gelu(a64 @ b64 + bias64, True), HALF)
    x, weight = device.zeros((1, 8), HALF), device.zeros((16, 8), HALF)
    assert device.epilogues.gelu_backward(a, b, x) is None
    assert not device.epilogues.linear_gradients(x, a, weight, bias, True)
    assert calls == ["product with a bias and GELU"]


@pytest.mark.parametrize("why", ["lines of 20", "address", "type", "single", "double", "k of one", "nothing"])
def test_epilogues_that_are_not_for_the_library(device, why):
    """No memory is taken and nothing written."""
    dtype, m, k, n = np.dtype({"double": np.float64, "single": np.float32}.get(why, np.float16)), 8, 16, 24
    n, k, m = 20 if why == "lines of 20" else n, 1 if why == "k of one" else k, 0 if why == "nothing" else m
    (a, _), (b, _), skip = values(device, dtype, m, k), values(device, dtype, k, n), 1 if why == "address" else 0
    other = SINGLE if why == "type" else dtype
    bias, x = device.zeros(n + skip, other)[skip:], device.zeros(m * n + skip, other)[skip:].reshape(m, n)
    weight, held = device.zeros((k, n), dtype), device.memory.current()
    if why != "k of one":
        assert device.epilogues.gelu(a, b, bias, True) is None
    assert device.epilogues.gelu_backward(a, b, x) is None
    if why not in ("lines of 20", "address", "type", "single"):
        assert not device.epilogues.linear_gradients(device.zeros((m, n), dtype), a, weight, bias, True)
    assert device.memory.current() == held and calls == []


class Layers:
    """A linear layer of d inputs and f outputs, a GELU, and one back, with all a model does to such: see `CASES`."""

    def __init__(self, device, dtype, case, x):
        self.device, self.dtype, self.case, self.x, random = device, dtype, case, x, np.random.default_rng(1)
        d, f, turn = x.shape[-1], 20 if case == "lines of 20" else 32, case != "apart"
        self.parameters, self.turn = {}, turn
        self.up, self.up_bias = self.parameter(random, "up", d, f) if turn else self.in_parts(random, "up", f, d), None
        self.up_bias = self.parameter(random, "up_bias", f) if turn else self.in_parts(random, "up_bias", f)
        self.down, self.down_bias = self.parameter(random, "down", f, d), self.parameter(random, "down_bias", d)
        for name, weight, shape in (("up", self.up, (f, d)), ("down", self.down, (d, f))):
            if case == f"adapter of {name}":
                a, b = self.parameter(random, "a", 4, shape[1]), self.parameter(random, "b", shape[0], 4)
                weight.adapter = Adapter(a, b, 0.5, 0.0)

    def parameter(self, random, name, *shape):
        made = self.parameters[name] = Parameter(name, shape, transposed=len(shape) == 2)
        made.bind(self.device.from_host(random.standard_normal(shape).astype(self.dtype)))
        frozen = self.case == f"{name} frozen"
        made.trainable = not frozen
        made.bind_grad(None if frozen else self.device.empty(shape, self.dtype))
        return made

    def in_parts(self, random, name, first, *rest):
        parts = [self.parameter(random, f"{name}{part}", first // 2, *rest) for part in range(2)]
        fused = Parameter.fuse(name, parts)
        fused.apart = True
        return fused

    def run(self):
        """Results by name: the output, and the gradients of the input and of the parameters."""
        case = self.case
        tape = Tape(self.device, fp8=case == "8 bits")
        x, out = Tensor(self.device.from_host(self.x.astype(self.dtype))), {}
        for _ in range(2 if case == "two micro-batches" else 1):
            h = ops.linear_gelu(tape, x, self.up, self.up_bias, self.turn, case != "exact")
            y = ops.linear(tape, h, self.down, self.down_bias, True)
            if case == "read twice":
                y = ops.residual(tape, y, ops.linear(tape, h, self.down, self.down_bias, True))
            out["y"] = y.data
            if case == "dropped":
                tape.drop_cheap()
            tape.backward(y, self.device.from_host(np.cos(np.arange(self.x.size)).reshape(self.x.shape).astype(self.dtype)),
                          inputs_only=case == "weights last")
            tape.backward_weights()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return {name: self.device.to_host(array) for name, array in {**out, "x": x.grad, **gradients}.items()}


FORWARD, BACKWARD, SUMS = "product with a bias and GELU, both kept", "product with GELU's derivative", "product with a bias gradient"
CASES = {  # which of the library's products are asked for
    "plain": [FORWARD, "product with a bias", SUMS, BACKWARD, SUMS],
    "dropped": [FORWARD, "product with a bias", SUMS, BACKWARD, SUMS],
    "weights last": [FORWARD, "product with a bias", BACKWARD, SUMS, SUMS],
    "two micro-batches": [FORWARD, "product with a bias", SUMS, BACKWARD, SUMS, FORWARD, "product with a bias", BACKWARD],
    "exact": ["product with a bias", "product with a bias", SUMS, SUMS],
    "adapter of up": ["product with a bias", "product with a bias", SUMS, BACKWARD, SUMS],
    "adapter of down": [FORWARD, "product with a bias", SUMS, SUMS],
    "up frozen": [FORWARD, "product with a bias", SUMS, BACKWARD],
    "up_bias frozen": [FORWARD, "product with a bias", SUMS, BACKWARD],
    "down frozen": [FORWARD, "product with a bias", BACKWARD, SUMS],
    "apart": [FORWARD, "product with a bias", SUMS, BACKWARD],
    "read twice": [FORWARD, "product with a bias", "product with a bias", SUMS, BACKWARD, BACKWARD, SUMS],
    "lines of 20": ["product with a bias", "product with a bias", SUMS, SUMS],
    "8 bits": ["product with a bias", "product with a bias"]}


@pytest.mark.parametrize("case", CASES)
def test_layers_with_a_gelu(device, exactly, case):
    """Output and gradients are the CPU's, of float64 but for what is rounded to 8 bits."""
    x = np.random.default_rng(0).standard_normal((2, 6, 16))
    if case == "8 bits":
        device.fp8_library = None
    found = Layers(device, SINGLE, case, x).run()
    assert calls == CASES[case]
    expected = Layers(EXACT, SINGLE if case == "8 bits" else np.dtype(float), case, x).run()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert_allclose(found[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_what_is_not_recorded(device):
    """In training the product is the one that will be recorded; else nothing is kept."""
    layers = Layers(device, HALF, "plain", np.ones((2, 3, 16)))
    x = Tensor(layers.device.from_host(layers.x.astype(HALF)))
    results = [ops.linear_gelu(Tape(device, recording, training), x, layers.up, layers.up_bias, True).data
               for recording, training in ((True, True), (False, True), (False, False))]
    assert calls == [FORWARD, FORWARD, "product with a bias and GELU"]
    first, *others = [device.to_host(result) for result in results]
    for other in others:
        assert_array_equal(other, first)


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
    assert plain.attention_library is plain.product_library is plain.epilogues is plain.fp8_library is None


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


@pytest.mark.parametrize(("wrong", "reason"), [
    ("gelu", "computes something else"), ("derivative", "computes something else"), ("sum", "computes something else"),
    ("GELU_AUX_BIAS", "has no products with a GELU of float16"), ("DGELU", "has no products with a GELU of float16"),
    ("BGRADA", "has no bias gradients of float16"), ("BGRADB", "has no bias gradients of float16")])
def test_epilogues_that_are_not_right_are_left_alone(plain, monkeypatch, wrong, reason):
    class Wrong(NumpyDevice):
        def gelu(self, x, approximate):
            return super().gelu(x + (1 if wrong == "gelu" else 0), approximate)

        def gelu_backward(self, dy, x, approximate, y=None):
            return dy if wrong == "derivative" else super().gelu_backward(dy, x, approximate, y)

    monkeypatch.setattr(lazy_nvidia, "EXACT", Wrong())
    if wrong == "sum":
        monkeypatch.setattr(lazy_nvidia, "SUMS", (lazy_nvidia.Epilogue.BGRADB,))  # the other writes none
    unsupported = lazy_nvidia._unsupported
    monkeypatch.setattr(lazy_nvidia, "_unsupported", lambda description, *rest: "not here" if wrong == lazy_nvidia.Epilogue(
        description[lazy_nvidia.MatmulDescAttribute.EPILOGUE]).name else unsupported(description, *rest))
    (found,) = gpu_libraries(plain, list)
    assert reason in found and "\n" not in found
    assert plain.epilogues is None and plain.product_library is not None and plain.fp8_library is not None
    without(plain)


def test_only_what_all_ranks_have_is_taken(plain):
    assert gpu_libraries(plain, lambda here: [False, here[1], False, False]) == []
    assert plain.attention_library is plain.epilogues is plain.fp8_library is None and plain.product_library is not None
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
    forward = 2 * 3  # layers x steps
    asked = {"attention": forward, "attention_backward": forward, "product with a bias": 3 * forward, FORWARD: forward,
             BACKWARD: forward, SUMS: 4 * forward}
    tried = [*asked, SUMS, "product with a bias and GELU"]
    assert Counter(call for call in calls if "8 bits" not in call) == (Counter(asked) + Counter(tried) if kernels == "auto" else {})


@pytest.mark.parametrize("recompute", ["none", "pointwise", "block"])
def test_the_golden_run_with_them(plain, exactly, recompute):
    """PyTorch's losses and norms of gradients, of float64; a layer's bias that does not lie well is not for the library."""
    reference, steps = golden.load("gpt2"), 6
    sharded = golden_sharded(reference, None, device="cupy", kernels="auto", recompute=recompute)
    adamw = dict(reference.meta["adamw"])
    optim = mps.AdamW(sharded, **{**adamw, "betas": tuple(adamw["betas"])}, clip_grad_norm=reference.meta["clip_grad_norm"])
    calls.clear()
    for step in range(steps):
        output = sharded.step(deal(reference.inputs[step], reference.targets[step], 6, 0, 1))
        assert_allclose(output.loss, reference.losses64[step], rtol=1e-5)
        assert_allclose(output.grad_norm, reference.grad_norms64[step], rtol=1e-4)
        optim.step(output)
    sharded.close()
    layers = 2 * 2 * steps  # times micro-batches and steps
    assert [calls.count(name) for name in (FORWARD, BACKWARD, SUMS)] == [layers * (2 if recompute == "block" else 1), layers, 3 * layers]
    assert "product with a bias and GELU" not in calls


@pytest.mark.parametrize(("device", "kernels", "remedy"), [("cupy", "numpy", "auto or cuda"), ("numpy", "cuda", "auto, numpy or compiled")])
def test_kernels_of_the_other_device(plain, device, kernels, remedy):
    with pytest.raises(ConfigError, match=f"run.kernels={kernels} is of a .*{remedy}"):
        mps.shard(mps.models.gpt2(mps.GPT2Config(vocab_size=8, max_seq_len=4, n_layers=1, d_model=8, n_heads=1)), device=device,
                  kernels=kernels)
