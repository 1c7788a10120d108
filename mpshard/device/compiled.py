"""The NumPy device with compiled kernels for float32: one pass over memory where NumPy needs a dozen, and attention whose
scores never leave the cache. What is not float32, or has no compiled kernel, is NumPy's, which is complete and the reference.

Products stay BLAS's, but of two kinds where a rank has one core: of float32 on AMD's processors with AVX-512, which NumPy's
BLAS has no kernels for ("zen4"), and of bfloat16 where the processor has its arithmetic, which that BLAS never uses.
Its results differ from NumPy's in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from mpshard.device import blas
from mpshard.device.c_library import all_instructions, at, kernel
from mpshard.device.numpy_device import NumpyDevice
from mpshard.device.numpy_memory import flat
from mpshard.device.numpy_random import spread_key
from mpshard.device.numpy_update import BF16
from mpshard.device.replay import Recorder

FLOAT32 = np.dtype(np.float32)
GRAIN = 1 << 16  # elements of the least work for a thread: some 20 us, where handing it over costs 10 to 20


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Threads for as many parts of a kernel: Python's lock is free while they compute."""
    return ThreadPoolExecutor(count, thread_name_prefix="mpshard-kernel")


class CompiledDevice(NumpyDevice):
    """As `NumpyDevice`.

    chosen: one of `all_instructions`; default the last.

    Attributes
    ----------
    products: whose instructions products use: "bf16", one of `all_instructions`, or "": BLAS's.
    panels: scratch memory of products, as much as one of them has needed.
    """

    def __init__(self, poison: bool = False, chosen: str = "") -> None:
        super().__init__(poison)
        chosen = chosen or all_instructions()[-1]
        self.about = f"numpy, kernels compiled for {chosen}"
        self.written_by: Recorder | None = None  # who writes down the calls of kernels at present
        self.panels = np.empty(0, FLOAT32)  # of products, the largest that one needed
        self.instructions, self.products = ("avx512", "avx512") if chosen == "zen4" else (chosen, "")

    def recorder(self) -> Recorder | None:
        return Recorder(self) if blas.threads() == 1 else None  # the parts of threads are not a sequence

    def run(self, name: str, *args: Any, chosen: str = "") -> Any:
        if self.written_by is not None:
            self.written_by.called(name, chosen or self.instructions, args)
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
        """A kernel that takes a number of elements, contiguous arrays of so many, and numbers."""
        _check_contiguous(arrays)
        n = arrays[0].size
        if blas.threads() == 1:
            if self.written_by is not None:
                self.written_by.called(name, self.instructions, (n, *arrays, *more))
            kernel(name, self.instructions)(n, *map(at, arrays), *more)
            return
        flats = [flat(array) for array in arrays]
        self.spread(n, 1, lambda lo, hi: self.run(name, hi - lo, *(array[lo:hi] for array in flats), *more))

    def by_row(self, name: str, n: int, width: int, *args: Any, cut: Sequence[int]) -> list[Any]:
        """A kernel that takes a number of rows, a width, and `args`, of which those numbered in `cut` are contiguous arrays of n
        rows, and every core gets all of the others. What the parts return."""
        _check_contiguous([args[number] for number in cut])
        if blas.threads() == 1:
            return [self.run(name, n, width, *args)] if n else []

        def part(lo: int, hi: int) -> Any:
            own = list(args)
            for number in cut:
                own[number] = flat(args[number]).reshape(n, -1)[lo:hi]
            return self.run(name, hi - lo, width, *own)

        return self.spread(n, width, part)

    # -- products and sums -------------------------------------------------------------------
    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, accumulate: bool = False,
               bias: np.ndarray | None = None) -> np.ndarray:
        sgemm = None if self.products else blas.sgemm()
        others = (not self.products and sgemm is None) or self.bf16_product is not None or blas.threads() > 1
        if others or a.dtype != FLOAT32 or b.dtype != FLOAT32:
            return super().matmul(a, b, out, accumulate, bias)
        (m, k), n = a.shape, b.shape[1]
        if out is None:
            out, accumulate = self.empty((m, n), FLOAT32), False
        (down_a, along_a), (down_b, along_b), (down, along) = a.strides, b.strides, out.strides
        one_way = 4 in (down_a, along_a) and 4 in (down_b, along_b) and along == 4  # bytes
        starts = bias is None or (k > 0 and not accumulate and bias.flags.c_contiguous and bias.dtype == FLOAT32)
        if not one_way or not starts or out.dtype != FLOAT32:
            return super().matmul(a, b, out, accumulate, bias)
        if sgemm is not None:
            self.run("blas_product", m, n, k, a, down_a // 4, along_a // 4, b, down_b // 4, along_b // 4, bias, out, down // 4, accumulate,
                     *sgemm)
            return out
        if self.panels.size < (size := _scratch("product_scratch", self.products, n)):
            self.panels = self.empty(size, FLOAT32)
        self.run("product", m, n, k, a, down_a // 4, along_a // 4, b, down_b // 4, along_b // 4, bias, out, down // 4, accumulate,
                 self.panels, chosen=self.products)
        return out

    def add(self, out: np.ndarray, x: np.ndarray) -> None:
        if out.dtype != FLOAT32 or x.dtype != FLOAT32 or not (out.flags.c_contiguous and x.flags.c_contiguous):
            return super().add(out, x)
        self.by_element("add", out, x)

    def column_sum(self, dy: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        if dy.dtype != FLOAT32 or out.dtype != FLOAT32 or not (dy.flags.c_contiguous and out.flags.c_contiguous):
            return super().column_sum(dy, out, accumulate)
        n, d = dy.shape
        if blas.threads() == 1:
            self.run("column_sum", n, d, dy, accumulate, out, self.empty(d, FLOAT32))
            return

        def part(lo: int, hi: int) -> np.ndarray:
            total = np.empty(d, FLOAT32)
            self.run("column_sum", hi - lo, d, dy[lo:hi], False, total, np.empty(d, FLOAT32))
            return total

        _store(self.spread(n, d, part), out, accumulate)

    def ordered_sum(self, parts: Sequence[np.ndarray], out: np.ndarray, accumulate: bool) -> None:
        if len(parts) != 2 or accumulate or not FLOAT32 == parts[0].dtype == parts[1].dtype == out.dtype:
            return super().ordered_sum(parts, out, accumulate)
        self.by_element("sum_of_two", *parts, out)

    def sum_of_squares(self, x: np.ndarray) -> float:
        if x.dtype != FLOAT32:
            return super().sum_of_squares(x)
        x1 = flat(x)
        if blas.threads() == 1:
            return self.run("sum_of_squares", x1.size, x1)
        return sum(self.spread(x1.size, 1, lambda lo, hi: self.run("sum_of_squares", hi - lo, x1[lo:hi])))

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
        self.by_row("swiglu", n, f, gate_up, y, cut=(0, 1))
        return y

    def swiglu_backward(self, dy: np.ndarray, gate_up: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
        if dy.dtype != FLOAT32:
            return super().swiglu_backward(dy, gate_up, y)
        n, f = dy.shape
        dx = self.empty((n, 2 * f), dy.dtype)
        self.by_row("swiglu_backward", n, f, dy, gate_up, dx, cut=(0, 1, 2))
        return dx

    # -- normalisation -----------------------------------------------------------------------
    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        if x.dtype != FLOAT32:
            return super().layer_norm(x, weight, bias, eps)
        d = x.shape[-1]
        n = x.size // d
        y, stats = self.empty(x.shape, FLOAT32), self.empty((2, n), FLOAT32)
        self.by_row("layer_norm", n, d, x, weight, bias, eps, y, *stats, cut=(0, 4, 5, 6))
        return y, stats

    def layer_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, dbias: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        if x.dtype != FLOAT32:
            return super().layer_norm_backward(dy, x, weight, stats, dweight, dbias, accumulate, dx)
        out = self.empty(x.shape, FLOAT32) if dx is None else dx
        return self._norm_backward("layer_norm_backward", dy, x, weight, [*stats], [dweight, dbias], accumulate,
                                   dx is not None, out)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        if x.dtype != FLOAT32:
            return super().rms_norm(x, weight, eps)
        d = x.shape[-1]
        n = x.size // d
        y, stats = self.empty(x.shape, FLOAT32), self.empty(n, FLOAT32)
        self.by_row("rms_norm", n, d, x, weight, eps, y, stats, cut=(0, 3, 4))
        return y, stats

    def rms_norm_backward(
        self, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: np.ndarray,
        dweight: np.ndarray | None, accumulate: bool, dx: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        if x.dtype != FLOAT32:
            return super().rms_norm_backward(dy, x, weight, stats, dweight, accumulate, dx)
        out = self.empty(x.shape, FLOAT32) if dx is None else dx
        return self._norm_backward("rms_norm_backward", dy, x, weight, [stats], [dweight], accumulate, dx is not None, out)

    def _norm_backward(self, name: str, dy: np.ndarray, x: np.ndarray, weight: np.ndarray, stats: Sequence[np.ndarray],
                       targets: Sequence[np.ndarray | None], accumulate: bool, add: bool, out: np.ndarray) -> np.ndarray:
        """stats: (n,) each. targets: (d,) each, None: not wanted. The kernel wants scratch memory for as many sums."""
        d = x.shape[-1]
        n, sums = x.size // d, len(targets) * d
        _check_contiguous((dy, x, out))
        if blas.threads() == 1:
            self.run(name, n, d, dy, x, weight, *stats, accumulate, *targets, self.empty(sums, FLOAT32), add, out)
            return out
        dy2, x2, out2 = (array.reshape(n, d) for array in (dy, x, out))

        def part(lo: int, hi: int) -> list[np.ndarray]:
            totals = [np.empty(d, FLOAT32) for _ in targets]
            self.run(name, hi - lo, d, dy2[lo:hi], x2[lo:hi], weight, *(stat[lo:hi] for stat in stats), False, *totals,
                     np.empty(sums, FLOAT32), add, out2[lo:hi])
            return totals

        parts = self.spread(n, d, part)
        for number, target in enumerate(targets):
            if target is not None:
                _store([totals[number] for totals in parts], target, accumulate)
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
        packed, size = _segments(segments), _scratch("attention_scratch", self.instructions, t, e)
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
        dqkv, packed = self.empty(qkv.shape, qkv.dtype), _segments(segments)
        size = _scratch("attention_backward_scratch", self.instructions, t, e)
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


@cache
def _scratch(name: str, chosen: str, *sizes: int) -> int:
    """How many floats of scratch memory a kernel needs."""
    return kernel(name, chosen)(*sizes)


def _check_contiguous(arrays: Sequence[np.ndarray]) -> None:
    """Unlike NumPy's kernels the compiled ones read on in memory from where an array starts."""
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} and strides {array.strides} is not contiguous")


def _store(parts: Sequence[np.ndarray], target: np.ndarray, accumulate: bool) -> None:
    """target (d,) = or += the sum of the parts (d,), in their order."""
    total = np.sum(parts, axis=0, dtype=FLOAT32) if parts else np.zeros_like(target)
    np.add(target, total, out=target) if accumulate else np.copyto(target, total)


def _segments(segments: np.ndarray | None) -> np.ndarray | None:
    return None if segments is None else np.ascontiguousarray(segments, np.int32)
