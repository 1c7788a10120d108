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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np

from mpshard.device import blas
from mpshard.device.numpy_device import NumpyDevice
from mpshard.device.numpy_memory import flat
from mpshard.device.numpy_norm import Columns
from mpshard.device.numpy_random import spread_key
from mpshard.device.numpy_update import BF16

VERSION = 3  # compiled.c's
ORDER = ("plain", "avx2", "avx512", "zen4")
FLOAT32 = np.dtype(np.float32)
GRAIN = 1 << 16  # elements of the least work for a thread: some 20 us, where handing it over costs 10 to 20


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Threads for as many parts of a kernel: Python's lock is free while they compute."""
    return ThreadPoolExecutor(count, thread_name_prefix="mpshard-kernel")


@cache
def load() -> ctypes.CDLL | str:
    """The library; or why there is none, in one line."""
    built = [path for suffix in EXTENSION_SUFFIXES for path in Path(__file__).parent.glob(f"_compiled{suffix}")]
    if not built:
        return "they were not built; is there a C compiler? Install mpshard again once there is"
    try:
        library = ctypes.CDLL(str(built[0]))
        if library.version() == VERSION:
            return library
    except (OSError, AttributeError) as error:
        return f"they cannot be loaded: {error}"
    return f"{built[0].name} was built from other sources: install mpshard again"


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
    "rotary": "llllpppf", "attention_scratch": "ll", "attention_backward_scratch": "ll", "attention": "llllllf" "ppppp",
    "attention_backward": "llllllf" "ppppppp", "product_scratch": "l", "product": "lll" "pll" "pll" "pplip",
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

    # -- cores -------------------------------------------------------------------------------
    def spread(self, n: int, elements: int, action: Callable[[int, int], Any]) -> list[Any]:
        """action(start, stop) over parts of range(n), one on each core of this rank, and what they return in order.

        elements: how many each of the n stands for: parts with too few are not worth a thread.
        """
        parts = min(blas.threads(), n, n * elements // GRAIN)
        if parts <= 1:
            return [action(0, n)] if n else []
        bounds = [n * part // parts for part in range(parts + 1)]
        return list(_workers(parts).map(action, bounds[:-1], bounds[1:]))

    def by_element(self, name: str, *arrays: np.ndarray, more: Sequence[float] = ()) -> None:
        """A kernel that takes a number of elements and contiguous arrays of so many."""
        flats = [flat(array) for array in arrays]
        self.spread(flats[0].size, 1, lambda lo, hi: self.run(name, hi - lo, *(array[lo:hi] for array in flats), *more))

    def by_row(self, name: str, n: int, width: int, *arrays: np.ndarray) -> None:
        """A kernel that takes a number of rows, a width, and contiguous arrays of n rows."""
        rows = [flat(array).reshape(n, -1) for array in arrays] if n else []
        self.spread(n, width, lambda lo, hi: self.run(name, hi - lo, width, *(array[lo:hi] for array in rows)))

    # -- products ----------------------------------------------------------------------------
    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, accumulate: bool = False,
               bias: np.ndarray | None = None) -> np.ndarray:
        others = self.bf16_product is not None or not self.products or blas.threads() > 1
        if others or a.dtype != FLOAT32 or b.dtype != FLOAT32:
            return super().matmul(a, b, out, accumulate, bias)
        (m, k), n = a.shape, b.shape[1]
        if out is None:
            out, accumulate = self.empty((m, n), a.dtype), False
        steps = [tuple(step // 4 for step in x.strides) for x in (a, b, out)]
        starts = bias is None or (k > 0 and not accumulate and bias.flags.c_contiguous and bias.dtype == FLOAT32)
        if not starts or 1 not in steps[0] or 1 not in steps[1] or steps[2][1] != 1 or out.dtype != FLOAT32:
            return super().matmul(a, b, out, accumulate, bias)
        scratch = self.empty(self.run("product_scratch", n, chosen=self.products), FLOAT32)
        self.run("product", m, n, k, a, *steps[0], b, *steps[1], bias, out, steps[2][0], accumulate, scratch, chosen=self.products)
        return out

    # -- activations -------------------------------------------------------------------------
    def gelu(self, x: np.ndarray, approximate: bool) -> np.ndarray:
        if x.dtype != FLOAT32 or not approximate:
            return super().gelu(x, approximate)
        y = self.empty(x.shape, x.dtype)
        self.by_element("gelu", x, y)
        return y

    def gelu_backward(self, dy: np.ndarray, x: np.ndarray, approximate: bool, y: np.ndarray | None = None) -> np.ndarray:
        if x.dtype != FLOAT32 or not approximate:
            return super().gelu_backward(dy, x, approximate, y)
        dx = self.empty(x.shape, x.dtype)
        self.by_element("gelu_backward", dy, x, dx)
        return dx

    def swiglu(self, gate_up: np.ndarray) -> np.ndarray:
        if gate_up.dtype != FLOAT32:
            return super().swiglu(gate_up)
        n, f = gate_up.shape[0], gate_up.shape[1] // 2
        y = self.empty((n, f), gate_up.dtype)
        self.by_row("swiglu", n, f, gate_up, y)
        return y

    def swiglu_backward(self, dy: np.ndarray, gate_up: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
        if dy.dtype != FLOAT32:
            return super().swiglu_backward(dy, gate_up, y)
        n, f = dy.shape
        dx = self.empty((n, 2 * f), dy.dtype)
        self.by_row("swiglu_backward", n, f, dy, gate_up, dx)
        return dx

    # -- normalisation -----------------------------------------------------------------------
    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        if x.dtype != FLOAT32:
            return super().layer_norm(x, weight, bias, eps)
        x2 = _rows(x)
        n, d = x2.shape
        y, stats = self.empty((n, d), x.dtype), self.empty((2, n), x.dtype)
        self.spread(n, d, lambda lo, hi: self.run("layer_norm", hi - lo, d, x2[lo:hi], weight, bias, eps, y[lo:hi],
                                                  stats[0, lo:hi], stats[1, lo:hi]))
        return y.reshape(x.shape), stats

    def layer_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, dbias: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        if x.dtype != FLOAT32:
            return super().layer_norm_backward(dy, x, weight, stats, dweight, dbias, accumulate, dx)
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        dy2, x2, out2 = map(_rows, (dy, x, out))
        n, d = x2.shape

        def part(lo: int, hi: int) -> Columns:
            columns = Columns(d, x.dtype)
            self.run("layer_norm_backward", hi - lo, d, dy2[lo:hi], x2[lo:hi], weight, stats[0, lo:hi], stats[1, lo:hi],
                     columns.weight, columns.bias, dx is not None, out2[lo:hi])
            return columns

        _sum_of(self.spread(n, d, part), d).store(dweight, dbias, accumulate)
        return out

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        if x.dtype != FLOAT32:
            return super().rms_norm(x, weight, eps)
        x2 = _rows(x)
        n, d = x2.shape
        y, stats = self.empty((n, d), x.dtype), self.empty(n, x.dtype)
        self.spread(n, d, lambda lo, hi: self.run("rms_norm", hi - lo, d, x2[lo:hi], weight, eps, y[lo:hi], stats[lo:hi]))
        return y.reshape(x.shape), stats

    def rms_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        if x.dtype != FLOAT32:
            return super().rms_norm_backward(dy, x, weight, stats, dweight, accumulate, dx)
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        dy2, x2, out2 = map(_rows, (dy, x, out))
        n, d = x2.shape

        def part(lo: int, hi: int) -> Columns:
            columns = Columns(d, x.dtype)
            self.run("rms_norm_backward", hi - lo, d, dy2[lo:hi], x2[lo:hi], weight, stats[lo:hi], columns.weight, dx is not None,
                     out2[lo:hi])
            return columns

        _sum_of(self.spread(n, d, part), d).store(dweight, None, accumulate)
        return out

    # -- attention ---------------------------------------------------------------------------
    def rotary(self, qkv: np.ndarray, heads: int, kv_heads: int, cos: np.ndarray, sin: np.ndarray, inverse: bool = False) -> None:
        if qkv.dtype != FLOAT32 or not (cos.flags.c_contiguous and sin.flags.c_contiguous):
            return super().rotary(qkv, heads, kv_heads, cos, sin, inverse)
        b, t, width = qkv.shape
        sequences, sign = flat(qkv).reshape(b, t, width), -1.0 if inverse else 1.0

        def part(lo: int, hi: int) -> None:
            for i in range(b):
                c, s = (a[lo:hi] if a.ndim == 2 else a[i, lo:hi] for a in (cos, sin))
                self.run("rotary", hi - lo, width, heads + kv_heads, cos.shape[-1], sequences[i, lo:hi], c, s, sign)

        self.spread(t, b * width, part)

    def attention(
        self, qkv: np.ndarray, heads: int, kv_heads: int, scale: float, segments: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        b, t, e = *qkv.shape[:2], qkv.shape[2] // (heads + 2 * kv_heads)
        if qkv.dtype != FLOAT32 or e % 16:  # whole vectors
            return super().attention(qkv, heads, kv_heads, scale, segments)
        y, lse = self.empty((b, t, heads * e), qkv.dtype), self.empty((b, heads, t), qkv.dtype)
        packed, size = _segments(segments), self.run("attention_scratch", t, e)
        self.spread(b * kv_heads, t * t * e, lambda lo, hi: self.run(
            "attention", lo, hi, t, heads, kv_heads, e, scale, flat(qkv), packed, y, lse, self.empty(size, FLOAT32)))
        return y, lse

    def attention_backward(
        self, dy: np.ndarray, qkv: np.ndarray, y: np.ndarray, lse: np.ndarray, heads: int, kv_heads: int, scale: float,
        segments: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        b, t, e = *qkv.shape[:2], qkv.shape[2] // (heads + 2 * kv_heads)
        if qkv.dtype != FLOAT32 or e % 16:
            return super().attention_backward(dy, qkv, y, lse, heads, kv_heads, scale, segments)
        dqkv, packed, size = self.empty(qkv.shape, qkv.dtype), _segments(segments), self.run("attention_backward_scratch", t, e)
        self.spread(b * kv_heads, t * t * e, lambda lo, hi: self.run(
            "attention_backward", lo, hi, t, heads, kv_heads, e, scale, flat(dy), flat(qkv), flat(y), flat(lse), packed, dqkv,
            self.empty(size, FLOAT32)))
        return dqkv

    # -- loss --------------------------------------------------------------------------------
    def exponentials(self, logits: np.ndarray, labels: np.ndarray, sums: np.ndarray, shifted: bool) -> float:
        if logits.dtype != FLOAT32:
            return super().exponentials(logits, labels, sums, shifted)
        (n, v), labels = logits.shape, np.ascontiguousarray(labels, np.int64)
        rows = flat(logits).reshape(n, v)
        return sum(self.spread(n, v, lambda lo, hi: self.run("exponentials", hi - lo, v, rows[lo:hi], labels[lo:hi], sums[lo:hi])))

    # -- dropout, optimizer, formats ---------------------------------------------------------
    def dropout(self, x: np.ndarray, probability: float, key: tuple[int, int], out: np.ndarray | None = None) -> np.ndarray:
        threshold = round(probability * 2**32)
        if x.dtype != FLOAT32 or not 0 <= probability < 1 or threshold >> 32 or x.size >> 32:
            return super().dropout(x, probability, key, out)
        if out is None:
            out = self.empty(x.shape, x.dtype)
        x1, out1, words = flat(x), flat(out), spread_key(key, 0)
        self.spread(x.size, 1, lambda lo, hi: self.run("dropout", hi - lo, x1[lo:hi], lo, *words, threshold, 1 / (1 - probability),
                                                       out1[lo:hi]))
        return out

    def adamw(
        self, weight: np.ndarray, gradient: np.ndarray, moment1: np.ndarray, moment2: np.ndarray, *,
        lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, gradient_scale: float,
    ) -> None:  # fmt: skip
        if weight.dtype != FLOAT32:
            return super().adamw(weight, gradient, moment1, moment2, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
                                 weight_decay=weight_decay, step=step, gradient_scale=gradient_scale)
        root = math.sqrt(1 - beta2**step)
        numbers = (beta1, beta2, (1 - beta1) * gradient_scale, math.sqrt(1 - beta2) * gradient_scale, eps * root,
                   lr * root / (1 - beta1**step), 1 - lr * weight_decay)
        self.by_element("adamw", weight, gradient, moment1, moment2, more=numbers)

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        kernels = {(FLOAT32, BF16): "to_bf16", (BF16, FLOAT32): "from_bf16"}
        name = kernels.get((x.dtype, out.dtype))
        if name is None or not (x.flags.c_contiguous and out.flags.c_contiguous):
            return super().cast(x, out)
        self.by_element(name, x, out)


def _rows(x: np.ndarray) -> np.ndarray:
    """(..., d) as (n, d). Unlike NumPy's kernels these need it contiguous: ValueError where it is not."""
    return flat(x).reshape(-1, x.shape[-1])


def _sum_of(parts: list[Columns], d: int) -> Columns:
    total = parts[0] if parts else Columns(d, FLOAT32)
    for part in parts[1:]:
        total.weight += part.weight
        total.bias += part.bias
    return total


def _segments(segments: np.ndarray | None) -> np.ndarray | None:
    return None if segments is None else np.ascontiguousarray(segments, np.int32)
