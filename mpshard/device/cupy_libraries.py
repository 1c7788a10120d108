"""NVIDIA's libraries beside the project's own kernels: which are here, and whether they compute the same.

Each is tried once when a device is opened, on a small case that the own kernels do too. One that is not installed, cannot be used,
or disagrees is left alone, with one line that says why: no training ends because an optional library is not what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from mpshard.device.base import Array, Device

TOLERANCE = 0.02  # of the largest value: ten units of rounding of float16, far below any mistake
EPILOGUES = "GELU and bias gradients"


@dataclass(frozen=True)
class Found:
    """A library that is right here, or why it is left alone, in one line. name: what it would do."""

    name: str
    library: Any
    reason: str = ""


def find(device: Any, fp8: bool = True) -> list[Found]:
    """cuDNN's attention and cuBLASLt's products with a bias, with a GELU and, with fp8, of 8 bits, each tried on `device`, which
    does not use them yet."""
    def attention() -> Any:
        from mpshard.device.cupy_cudnn import Attention

        return Attention(device)

    @cache
    def products() -> Any:
        from mpshard.device.cupy_cublaslt import Products

        return Products(device)

    def products_of_8_bits() -> Any:
        from mpshard.device.cupy_cublaslt import Fp8Products

        return Fp8Products(device)

    tried = [_tried("attention", "cudnn", "nvidia-cudnn-frontend", attention, lambda found: _attention_differs(device, found)),
             _tried("bias", "nvmath", "nvmath-python", products, lambda found: _product_differs(device, found)),
             _tried(EPILOGUES, "nvmath", "nvmath-python", products, lambda found: _epilogues_differ(device, found))]
    if fp8:
        tried.append(_tried("fp8", "nvmath", "nvmath-python", products_of_8_bits, lambda found: _fp8_differs(device, found)))
    return tried


def use(device: Any, libraries: Sequence[Found]) -> None:
    """Let `device` use these of what `find` found."""
    taken = {found.name: found.library for found in libraries if found.library is not None}
    device.attention_library, device.product_library, device.epilogues, device.fp8_library = (
        taken.get(name) for name in ("attention", "bias", EPILOGUES, "fp8"))
    # Products of 8 bits are told of where they are chosen: see `Device.fp8_products`.
    device.about += "".join(f", {name} by {library.about}" for name, library in taken.items() if name != "fp8")


def _tried(name: str, module: str, package: str, open_it: Callable[[], Any], differs: Callable[[Any], str]) -> Found:
    if find_spec(module) is None:
        return Found(name, None, f"{package} is not installed")
    try:
        found = open_it()
        problem = differs(found)
    except Exception as error:  # of a library that raises what it likes, or was built for another CUDA
        return Found(name, None, f"{package} cannot be used: {type(error).__name__} {' '.join(str(error).split())[:200]}")
    return Found(name, None, problem) if problem else Found(name, found)


def _attention_differs(device: Device, library: Any) -> str:
    """Why the library's attention is not to be trusted; empty if it agrees with the own kernels, forward and backward."""
    b, t, h, k, e, scale = 2, 128, 4, 2, 64, 0.125  # of two tiles, with shared key/value heads: what every version takes
    qkv, dy = _random(device, b, t, (h + 2 * k) * e), _random(device, b, t, h * e)
    y, lse = device.attention(qkv, h, k, scale)
    dqkv = device.attention_backward(dy, qkv, y, lse, h, k, scale)
    theirs = [device.empty(array.shape, array.dtype) for array in (y, lse, dqkv)]
    if not (library.forward(qkv, h, k, scale, theirs[0], theirs[1])
            and library.backward(dy, qkv, theirs[0], theirs[1], h, k, scale, theirs[2])):
        return f"{library.about} has no attention for {t} positions, heads of {e}, {qkv.dtype}"
    return _compare(device, library.about, (y, lse, dqkv), theirs)


def _product_differs(device: Any, library: Any) -> str:
    a, b, bias = _random(device, 48, 64), _random(device, 80, 64), _random(device, 80)
    ours = device.matmul(a, b.T, bias=bias)
    theirs = device.empty(ours.shape, ours.dtype)
    if not library.add_bias(a, b.T, bias, theirs):
        return f"{library.about} has no product with a bias of {a.dtype}"
    return _compare(device, library.about, (ours,), [theirs])


def _epilogues_differ(device: Any, library: Any) -> str:
    """As `_product_differs`: a linear layer and a GELU forward, kept for backward or not, and backward, weights either way round."""
    x = _random(device, 48, 64, scale=1 / 8)  # so that GELU is taken of what is about one
    w, bias, dy, v = (_random(device, *shape) for shape in ((80, 64), (80,), (48, 32), (32, 80)))
    h = device.matmul(x, w.T, bias=bias)
    y, dh = device.gelu(h, True), device.gelu_backward(device.matmul(dy, v), h, True)
    kept, alone, backward = library.gelu(x, w.T, bias, True), library.gelu(x, w.T, bias, False), library.gelu_backward(dy, v, h)
    if kept is None or alone is None or backward is None:
        return f"{library.about} has no products with a GELU of {x.dtype}"
    ours, theirs = [y, h, y, dh], [*kept, alone[0], backward]
    for transposed, a, b in ((False, dh.T, x), (True, x.T, dh)):
        own = device.matmul(a, b), device.empty(80, dh.dtype)
        device.column_sum(dh, own[1], False)
        other = [device.zeros(part.shape, part.dtype) for part in own]
        if not library.linear_gradients(dh, x, *other, transposed):
            return f"{library.about} has no bias gradients of {x.dtype}"
        ours, theirs = [*ours, *own], [*theirs, *other]
    return _compare(device, library.about, ours, theirs)


def _fp8_differs(device: Any, library: Any) -> str:
    """As `_product_differs`: activations by weights with a bias, and a gradient of weights, added to."""
    x, w, dy, bias = _random(device, 48, 64), _random(device, 80, 64), _random(device, 48, 80), _random(device, 80)

    def both() -> tuple[Array, Array]:
        dw = device.zeros((80, 64), np.float32)
        device.matmul_fp8(dy.T, x, (True, False), out=dw, accumulate=True)
        return device.matmul_fp8(x, w.T, bias=bias), dw

    ours = both()
    forward, backward = ((48, 80, 64), (False, False), ours[0], False, bias), ((80, 64, 48), (True, False), ours[1], True, None)
    if library.product(*forward) is None or library.product(*backward) is None:
        return f"{library.about} has no products of 8 bits on this GPU"
    device.fp8_library = library
    try:
        return _compare(device, library.about, ours, both())
    finally:
        device.fp8_library = None


def _compare(device: Device, about: str, ours: Sequence[Array], theirs: Sequence[Array]) -> str:
    for x, y in zip(ours, theirs, strict=True):
        own, other = (device.to_host(array).astype(np.float64) for array in (x, y))
        apart = np.abs(own - other).max() / np.abs(own).max()
        if not apart <= TOLERANCE:
            return f"{about} computes something else here: {apart:.1g} of the largest value apart"
    return ""


def _random(device: Device, *shape: int, scale: float = 1.0) -> Array:
    """Of float16, the 16-bit type of every CuPy; of another shape other numbers, so that products have no large elements."""
    return device.from_host((scale * np.random.default_rng(shape).standard_normal(shape, np.float32)).astype(np.float16))
