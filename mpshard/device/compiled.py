"""The NumPy device with compiled kernels for float32: one pass over memory where NumPy needs a dozen, and attention whose
scores never leave the cache. What is not float32, or has no compiled kernel, is NumPy's, which is complete and the reference.

Products stay BLAS's, but of two kinds where a rank has one core: of float32 on AMD's processors with AVX-512, which NumPy's
BLAS has no kernels for ("zen4"), and of bfloat16 where the processor has its arithmetic, which that BLAS never uses.

The library is built with the package where there is a C compiler (`compiled.c`), with the kernels for several sets of
instructions, of which the processor's best is taken. Its results differ from NumPy's in the last bits.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np

from mpshard.device import blas
from mpshard.device.numpy_device import NumpyDevice
from mpshard.device.numpy_memory import flat, rows_of
from mpshard.device.numpy_norm import Columns
from mpshard.device.numpy_random import spread_key
from mpshard.device.numpy_update import BF16

ORDER = ("plain", "avx2", "avx512", "zen4")
FLOAT32 = np.dtype(np.float32)


@cache
def load() -> ctypes.CDLL | str:
    """The library; or why there is none, in one line."""
    built = [path for suffix in EXTENSION_SUFFIXES for path in Path(__file__).parent.glob(f"_compiled{suffix}")]
    if not built:
        return "they were not built; is there a C compiler? Install mpshard again once there is"
    try:
        return ctypes.CDLL(str(built[0]))
    except OSError as error:
        return f"they cannot be loaded: {error}"


@cache
def all_instructions() -> tuple[str, ...]:
    """The sets of instructions that there are kernels for here, each the one before and more; none without the library.

    "zen4" is avx512's, and products.
    """
    library = load()
    if isinstance(library, str):
        return ()
    library.instructions.restype = ctypes.c_char_p
    best = library.instructions().decode()
    return ORDER[: ORDER.index("zen4" if best == "avx512" and library.multiplies() else best) + 1]


def multiplies_bf16() -> bool:
    """Whether there are products of bfloat16 here."""
    library = load()
    return not isinstance(library, str) and bool(library.multiplies_bf16())


# Parameters of each kernel: l long, f float, i int, u unsigned, p pointer to an array's first element.
SIGNATURES = {
    "gelu": "lpp", "gelu_backward": "lppp", "swiglu": "llpp", "swiglu_backward": "llppp",
    "layer_norm": "llpppfppp", "layer_norm_backward": "llppppppp" "ip", "rms_norm": "llppfpp", "rms_norm_backward": "llppppp" "ip",
    "exponentials": "llppp", "adamw": "lpppp" "fffffff", "to_bf16": "lpp", "from_bf16": "lpp", "dropout": "lpuuuufp",
    "rotary": "llllpppf", "attention_scratch": "ll", "attention_backward_scratch": "ll", "attention": "lllllf" "ppppp",
    "attention_backward": "lllllf" "ppppppp", "product_scratch": "l", "product": "lll" "pll" "pll" "plip",
}
_TYPES = {"l": ctypes.c_long, "f": ctypes.c_float, "i": ctypes.c_int, "u": ctypes.c_uint, "p": ctypes.c_void_p}
_RESULTS = {"exponentials": ctypes.c_double,
            **dict.fromkeys(("attention_scratch", "attention_backward_scratch", "product_scratch"), ctypes.c_long)}


@cache
def kernel(name: str, chosen: str) -> Any:
    """A kernel, for a set of instructions, or "bf16" for a product."""
    library = load()
    assert not isinstance(library, str)
    found = getattr(library, f"{name}_{chosen}")
    found.argtypes, found.restype = [_TYPES[letter] for letter in SIGNATURES[name]], _RESULTS.get(name)
    return found


def at(array: np.ndarray | None) -> int | None:
    """Where an array's first element is."""
    return None if array is None else array.__array_interface__["data"][0]


class CompiledDevice(NumpyDevice):
    """As `NumpyDevice`.

    chosen: one of `all_instructions`; default the last.

    Attributes
    ----------
    products: whose instructions products use: "bf16", one of `all_instructions`, or "": BLAS's.
    """

    def __init__(self, poison: bool = False, chosen: str = "") -> None:
        super().__init__(poison)
        chosen = chosen or all_instructions()[-1]
        self.about = f"numpy, kernels compiled for {chosen}"
        self.instructions, self.products = ("avx512", "avx512") if chosen == "zen4" else (chosen, "")

    def run(self, name: str, *args: Any, chosen: str = "") -> Any:
        return kernel(name, chosen or self.instructions)(*[at(a) if isinstance(a, np.ndarray) else a for a in args])

    # -- products ----------------------------------------------------------------------------
    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, accumulate: bool = False) -> np.ndarray:
        if not self.products or blas.threads() > 1 or a.dtype != FLOAT32 or b.dtype != FLOAT32:
            return super().matmul(a, b, out, accumulate)
        (m, k), n = a.shape, b.shape[1]
        if out is None:
            out, accumulate = self.empty((m, n), a.dtype), False
        steps = [tuple(step // 4 for step in x.strides) for x in (a, b, out)]
        if 1 not in steps[0] or 1 not in steps[1] or steps[2][1] != 1 or out.dtype != FLOAT32:
            return super().matmul(a, b, out, accumulate)
        scratch = self.empty(self.run("product_scratch", n, chosen=self.products), FLOAT32)
        self.run("product", m, n, k, a, *steps[0], b, *steps[1], out, steps[2][0], accumulate, scratch, chosen=self.products)
        return out

    # -- activations -------------------------------------------------------------------------
    def gelu(self, x: np.ndarray, approximate: bool) -> np.ndarray:
        if x.dtype != FLOAT32 or not approximate:
            return super().gelu(x, approximate)
        y = self.empty(x.shape, x.dtype)
        self.run("gelu", x.size, flat(x), y)
        return y

    def gelu_backward(self, dy: np.ndarray, x: np.ndarray, approximate: bool, y: np.ndarray | None = None) -> np.ndarray:
        if x.dtype != FLOAT32 or not approximate:
            return super().gelu_backward(dy, x, approximate, y)
        dx = self.empty(x.shape, x.dtype)
        self.run("gelu_backward", x.size, flat(dy), flat(x), dx)
        return dx

    def swiglu(self, gate_up: np.ndarray) -> np.ndarray:
        if gate_up.dtype != FLOAT32:
            return super().swiglu(gate_up)
        n, f = gate_up.shape[0], gate_up.shape[1] // 2
        y = self.empty((n, f), gate_up.dtype)
        self.run("swiglu", n, f, flat(gate_up), y)
        return y

    def swiglu_backward(self, dy: np.ndarray, gate_up: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
        if dy.dtype != FLOAT32:
            return super().swiglu_backward(dy, gate_up, y)
        n, f = dy.shape
        dx = self.empty((n, 2 * f), dy.dtype)
        self.run("swiglu_backward", n, f, flat(dy), flat(gate_up), dx)
        return dx

    # -- normalisation -----------------------------------------------------------------------
    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        if x.dtype != FLOAT32:
            return super().layer_norm(x, weight, bias, eps)
        n, d = rows_of(x).shape
        y, stats = self.empty(x.shape, x.dtype), self.empty((2, n), x.dtype)
        self.run("layer_norm", n, d, flat(x), weight, bias, eps, y, stats[0], stats[1])
        return y, stats

    def layer_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, dbias: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        if x.dtype != FLOAT32:
            return super().layer_norm_backward(dy, x, weight, stats, dweight, dbias, accumulate, dx)
        (n, d), columns = rows_of(x).shape, Columns(x.shape[-1], x.dtype)
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        self.run("layer_norm_backward", n, d, flat(dy), flat(x), weight, stats[0], stats[1], columns.weight, columns.bias,
                 dx is not None, flat(out))
        columns.store(dweight, dbias, accumulate)
        return out

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        if x.dtype != FLOAT32:
            return super().rms_norm(x, weight, eps)
        n, d = rows_of(x).shape
        y, stats = self.empty(x.shape, x.dtype), self.empty(n, x.dtype)
        self.run("rms_norm", n, d, flat(x), weight, eps, y, stats)
        return y, stats

    def rms_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        if x.dtype != FLOAT32:
            return super().rms_norm_backward(dy, x, weight, stats, dweight, accumulate, dx)
        (n, d), columns = rows_of(x).shape, Columns(x.shape[-1], x.dtype)
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        self.run("rms_norm_backward", n, d, flat(dy), flat(x), weight, stats, columns.weight, dx is not None, flat(out))
        columns.store(dweight, None, accumulate)
        return out

    # -- attention ---------------------------------------------------------------------------
    def rotary(self, qkv: np.ndarray, heads: int, kv_heads: int, cos: np.ndarray, sin: np.ndarray, inverse: bool = False) -> None:
        if qkv.dtype != FLOAT32 or not (cos.flags.c_contiguous and sin.flags.c_contiguous):
            return super().rotary(qkv, heads, kv_heads, cos, sin, inverse)
        _, t, width = qkv.shape
        for number, sequence in enumerate(qkv):
            angles = (cos, sin) if cos.ndim == 2 else (cos[number], sin[number])
            self.run("rotary", t, width, heads + kv_heads, cos.shape[-1], flat(sequence), *angles, -1.0 if inverse else 1.0)

    def attention(
        self, qkv: np.ndarray, heads: int, kv_heads: int, scale: float, segments: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        b, t, e = *qkv.shape[:2], qkv.shape[2] // (heads + 2 * kv_heads)
        if qkv.dtype != FLOAT32 or e % 16:  # whole vectors
            return super().attention(qkv, heads, kv_heads, scale, segments)
        y, lse = self.empty((b, t, heads * e), qkv.dtype), self.empty((b, heads, t), qkv.dtype)
        scratch = self.empty(self.run("attention_scratch", t, e), qkv.dtype)
        self.run("attention", b, t, heads, kv_heads, e, scale, flat(qkv), _segments(segments), y, lse, scratch)
        return y, lse

    def attention_backward(
        self, dy: np.ndarray, qkv: np.ndarray, y: np.ndarray, lse: np.ndarray, heads: int, kv_heads: int, scale: float,
        segments: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        b, t, e = *qkv.shape[:2], qkv.shape[2] // (heads + 2 * kv_heads)
        if qkv.dtype != FLOAT32 or e % 16:
            return super().attention_backward(dy, qkv, y, lse, heads, kv_heads, scale, segments)
        dqkv, scratch = self.empty(qkv.shape, qkv.dtype), self.empty(self.run("attention_backward_scratch", t, e), qkv.dtype)
        self.run("attention_backward", b, t, heads, kv_heads, e, scale, flat(dy), flat(qkv), flat(y), flat(lse),
                 _segments(segments), dqkv, scratch)
        return dqkv

    # -- loss --------------------------------------------------------------------------------
    def exponentials(self, logits: np.ndarray, labels: np.ndarray, sums: np.ndarray, shifted: bool) -> float:
        if logits.dtype != FLOAT32:
            return super().exponentials(logits, labels, sums, shifted)
        return self.run("exponentials", *logits.shape, flat(logits), np.ascontiguousarray(labels, np.int64), sums)

    # -- dropout, optimizer, formats ---------------------------------------------------------
    def dropout(self, x: np.ndarray, probability: float, key: tuple[int, int], out: np.ndarray | None = None) -> np.ndarray:
        if x.dtype != FLOAT32 or not 0 <= probability < 1:
            return super().dropout(x, probability, key, out)
        if out is None:
            out = self.empty(x.shape, x.dtype)
        x1, out1, threshold = flat(x), flat(out), round(probability * 2**32)
        if threshold >> 32:  # of a probability that float64 cannot tell from 1
            return super().dropout(x, probability, key, out)
        for start in range(0, x.size, 1 << 32):
            part = slice(start, start + (1 << 32))
            self.run("dropout", x1[part].size, x1[part], 0, *spread_key(key, start >> 32), threshold, 1 / (1 - probability), out1[part])
        return out

    def adamw(
        self, weight: np.ndarray, gradient: np.ndarray, moment1: np.ndarray, moment2: np.ndarray, *,
        lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, gradient_scale: float,
    ) -> None:  # fmt: skip
        if weight.dtype != FLOAT32:
            return super().adamw(weight, gradient, moment1, moment2, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
                                 weight_decay=weight_decay, step=step, gradient_scale=gradient_scale)
        root = math.sqrt(1 - beta2**step)
        self.run("adamw", weight.size, *map(flat, (weight, gradient, moment1, moment2)), beta1, beta2, (1 - beta1) * gradient_scale,
                 math.sqrt(1 - beta2) * gradient_scale, eps * root, lr * root / (1 - beta1**step), 1 - lr * weight_decay)

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        kernels = {(FLOAT32, BF16): "to_bf16", (BF16, FLOAT32): "from_bf16"}
        name = kernels.get((x.dtype, out.dtype))
        if name is None or not (x.flags.c_contiguous and out.flags.c_contiguous):
            return super().cast(x, out)
        self.run(name, x.size, x, out)


def _segments(segments: np.ndarray | None) -> np.ndarray | None:
    return None if segments is None else np.ascontiguousarray(segments, np.int32)
