"""The CuPy device: every kernel of `mpshard.device.base.Device` on a GPU.

Matrix products are cuBLAS's, with float32 sums whatever the inputs; all between them are the project's own CUDA kernels
(`cupy_kernels/`). Arrays are float32, float16, bfloat16 (a type of `ml_dtypes`; CuPy >= 14) or, for tests, float64;
statistics and sums inside kernels are float32, float64 for float64.

Every sum has one order, given by the shapes: the same numbers come out every time. Nothing here waits for the GPU.
So what NumPy refuses with an error (a token outside the vocabulary) shows here as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from mpshard.device.base import Array, Epilogues
from mpshard.device.cupy_attention import AttentionKernels
from mpshard.device.cupy_fp8 import Fp8Kernels
from mpshard.device.cupy_memory import CupyMemory, orientation
from mpshard.device.cupy_source import CUDA_TYPES
from mpshard.device.numpy_random import spread_key

LOGIT_BYTES = 256 << 20  # of one chunk of logits
SUM_LINES = 128  # partial sums of a column, at most
SUM_BLOCKS = 1024  # partial sums of a flat array


class CupyDevice(AttentionKernels, Fp8Kernels, CupyMemory):
    """Implements `mpshard.device.base.Accelerator`, where the methods are described.

    Parameters
    ----------
    poison, node_rank, node_ranks: see `CupyMemory`.
    tf32: products of float32 arrays by tensor cores, inputs rounded to 10 bits after the point. Off: full float32.

    Attributes
    ----------
    product_library: cuBLASLt's products with a bias, see `cupy_cublaslt`; None: a kernel adds it. All libraries, of which
        `epilogues` is one, are set by `cupy_libraries.use`.
    """

    product_library: Any = None
    epilogues: Epilogues | None = None

    def __init__(self, poison: bool = False, node_rank: int = 0, node_ranks: int = 1, tf32: bool = False) -> None:
        super().__init__(poison, node_rank, node_ranks)
        self.tf32 = tf32
        self.about += ", float32 products in TF32" if tf32 else ""
        self._handle = cupy.cuda.device.get_cublas_handle()
        # cuBLAS reads its factors from the host, through pointers that must stay valid.
        self._factors = {dtype: np.array([0, 1], dtype) for dtype in (np.float32, np.float64)}

    # -- dense -------------------------------------------------------------------------------
    def matmul(self, a: Array, b: Array, out: Array | None = None, accumulate: bool = False, bias: Array | None = None) -> Array:
        if bias is None:
            return self._product(a, b, out, accumulate)
        out = self.empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out
        library = None if accumulate else self.product_library
        if library is None or not library.add_bias(a, b, bias, out):
            self.add_bias(self._product(a, b, out, accumulate), bias)
        return out

    def _product(self, a: Array, b: Array, out: Array | None, accumulate: bool) -> Array:
        (m, k), n = a.shape, b.shape[1]
        if out is None:
            out = self.empty((m, n), a.dtype)
        if m == 0 or n == 0 or k == 0:
            if not accumulate:
                self.zero(out)
            return out
        # cuBLAS thinks in columns, and row-major a @ b is column-major (b.T @ a.T).T: so b comes first.
        turn_b, step_b = orientation(b)
        turn_a, step_a = orientation(a)
        double = out.dtype == np.float64
        factors = self._factors[np.float64 if double else np.float32]
        one, zero = factors.ctypes.data + factors.itemsize, factors.ctypes.data
        if double:
            arithmetic = cublas.CUBLAS_COMPUTE_64F
        elif self.tf32 and a.dtype == np.float32:
            arithmetic = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
        else:
            arithmetic = cublas.CUBLAS_COMPUTE_32F
        type_a, type_b, type_out = (CUDA_TYPES[array.dtype.name] for array in (a, b, out))
        cublas.gemmEx(
            self._handle, turn_b, turn_a, n, m, k, one, b.data.ptr, type_b, step_b, a.data.ptr, type_a, step_a,
            one if accumulate else zero, out.data.ptr, type_out, n, arithmetic, cublas.CUBLAS_GEMM_DEFAULT)
        return out

    def matmul_fp8(
        self, a: Array, b: Array, gradients: tuple[bool, bool] = (False, False), out: Array | None = None,
        accumulate: bool = False, bias: Array | None = None,
    ) -> Array:
        out = self.empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out
        library = self.fp8_library
        product = None if library is None else library.product((*out.shape, a.shape[1]), gradients, out, accumulate, bias)
        if product is None:
            a, b = (self.round_to_fp8(x, gradient) for x, gradient in zip((a, b), gradients, strict=True))
            return self.matmul(a, b, out, accumulate, bias)
        library.run(product, self.to_fp8(a, gradients[0]), self.to_fp8(b.T, gradients[1]), bias, out)
        if bias is not None and not product.adds_bias:
            self.add_bias(out, bias)
        return out

    def add_bias(self, y: Array, bias: Array) -> None:
        self._rows("add_bias", y.size // max(1, bias.size), bias.size, (y, bias), y.dtype)

    def add(self, out: Array, x: Array) -> None:
        self._elementwise("add", out.size, (out, x, out.size), out.dtype, x.dtype)

    def cast(self, x: Array, out: Array) -> None:
        self._elementwise("cast", x.size, (x, out, x.size), x.dtype, out.dtype)

    def column_sum(self, dy: Array, out: Array, accumulate: bool) -> None:
        rows, d = dy.shape
        height = max(256, -(-rows // SUM_LINES))
        lines = max(1, -(-rows // height))
        partial = self.empty((lines, d), wide(dy.dtype))
        if d:
            self.launch("column_sum", (-(-d // 32), lines), 256, (dy, partial, rows, d, height), dy.dtype)
        self._finish_columns(partial, out, accumulate)

    def _finish_columns(self, partial: Array, out: Array, accumulate: bool) -> None:
        lines, d = partial.shape
        self._elementwise("column_sum_finish", d, (partial, out, lines, d, accumulate), partial.dtype, out.dtype)

    # -- embedding ---------------------------------------------------------------------------
    def embedding(self, ids: Array, table: Array) -> Array:
        v, d = table.shape
        out = self.empty((*ids.shape, d), table.dtype)
        self._rows("embedding", ids.size, d, (ids, table, out), table.dtype, more=(v,))
        return out

    def add_positions(self, x: Array, positions: Array) -> None:
        self.add_bias(x, positions[: x.shape[1]])

    def embedding_backward(self, dy: Array, ids: Array, out: Array, accumulate: bool) -> None:
        v, d = out.shape
        if not accumulate:
            self.zero(out)
        if ids.size:
            self.launch("embedding_backward", (ids.size,), 128, (dy, ids, out, ids.size, d, v), dy.dtype, out.dtype,
                        shared=d * wide(dy.dtype).itemsize)

    def positions_backward(self, dy: Array, out: Array, accumulate: bool) -> None:
        b, t, d = dy.shape
        if b:
            self.column_sum(dy.reshape(b, t * d), out[:t].reshape(t * d), accumulate)
        if not accumulate:
            self.zero(out[t if b else 0:])

    # -- normalisation -----------------------------------------------------------------------
    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array]:
        rows, d = _rows(x)
        y, stats = self.empty(x.shape, x.dtype), self.empty((2, rows), wide(x.dtype))
        if x.size:
            self._rows("layer_norm", rows, d, (x, weight, bias, y, stats), x.dtype, more=(float(eps),))
        return y, stats

    def layer_norm_backward(
        self, dy: Array, x: Array, weight: Array, stats: Array,
        dweight: Array | None, dbias: Array | None, accumulate: bool, dx: Array | None,
    ) -> Array:
        return self._norm_backward("layer_norm_backward", dy, x, weight, stats, (dweight, dbias), accumulate, dx)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        rows, d = _rows(x)
        y, stats = self.empty(x.shape, x.dtype), self.empty(rows, wide(x.dtype))
        if x.size:
            self._rows("rms_norm", rows, d, (x, weight, y, stats), x.dtype, more=(float(eps),))
        return y, stats

    def rms_norm_backward(
        self, dy: Array, x: Array, weight: Array, stats: Array,
        dweight: Array | None, accumulate: bool, dx: Array | None,
    ) -> Array:
        return self._norm_backward("rms_norm_backward", dy, x, weight, stats, (dweight,), accumulate, dx)

    def _norm_backward(self, kernel: str, dy: Array, x: Array, weight: Array, stats: Array,
                       targets: tuple[Array | None, ...], accumulate: bool, dx: Array | None) -> Array:
        rows, d = _rows(x)
        out = self.empty(x.shape, x.dtype) if dx is None else dx
        lines = max(1, min(rows, 4 * SUM_LINES))
        partial = self.empty((len(targets), lines, d), wide(x.dtype))
        if x.size:
            args = (dy, x, weight, stats, out, *partial, rows, d, dx is not None)
            self.launch(kernel, (lines,), _row_threads(d), args, x.dtype)
        else:
            self.zero(partial)
        for sums, target in zip(partial, targets, strict=True):
            if target is not None:
                self._finish_columns(sums, target, accumulate)
        return out

    # -- activations -------------------------------------------------------------------------
    def gelu(self, x: Array, approximate: bool) -> Array:
        y = self.empty(x.shape, x.dtype)
        self._elementwise("gelu", x.size, (x, y, x.size, approximate), x.dtype)
        return y

    def gelu_backward(self, dy: Array, x: Array, approximate: bool, y: Array | None = None) -> Array:
        # y would save an exponential, which costs less here than reading y would.
        dx = self.empty(x.shape, x.dtype)
        self._elementwise("gelu_backward", x.size, (dy, x, dx, x.size, approximate), x.dtype)
        return dx

    def swiglu(self, gate_up: Array) -> Array:
        n, f = gate_up.shape[0], gate_up.shape[1] // 2
        y = self.empty((n, f), gate_up.dtype)
        self._rows("swiglu", n, f, (gate_up, y), y.dtype)
        return y

    def swiglu_backward(self, dy: Array, gate_up: Array, y: Array | None = None) -> Array:
        dx = self.empty(gate_up.shape, gate_up.dtype)
        self._rows("swiglu_backward", *dy.shape, (dy, gate_up, dx), dy.dtype)
        return dx

    # -- loss --------------------------------------------------------------------------------
    def cross_entropy(
        self, x: Array, table: Array, targets: Array, ignore_index: int,
        scale: float, dtable: Array | None, accumulate: bool, want_dx: bool,
    ) -> tuple[Array, Array | None]:
        # Which tokens are valid only the GPU knows: here those without a target cost as much as the others.
        (n, d), v, dtype = x.shape, len(table), wide(x.dtype)
        dx = self.empty((n, d), x.dtype) if want_dx else None
        step = max(1, min(n, LOGIT_BYTES // (v * dtype.itemsize)))
        logits, losses = self.empty((step, v), dtype), self.empty(n, dtype)
        wanted = dx is not None or dtable is not None
        slopes = logits if x.dtype == dtype or not wanted else self.empty((step, v), x.dtype)
        if dtable is not None and not accumulate and n == 0:
            self.zero(dtable)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            count = rows.stop - start
            self.matmul(x[rows], table.T, out=logits[:count])
            args = (logits, targets[rows], losses[rows], slopes if wanted else 0, v, ignore_index, float(scale))
            self.launch("softmax_loss", (count,), _row_threads(v), args, x.dtype, dtype)
            if dtable is not None:
                self.matmul(slopes[:count].T, x[rows], out=dtable, accumulate=accumulate or start > 0)
            if dx is not None:
                self.matmul(slopes[:count], table, out=dx[rows])
        return self._total(losses), dx

    # -- dropout -----------------------------------------------------------------------------
    def dropout(self, x: Array, probability: float, key: tuple[int, int], out: Array | None = None) -> Array:
        if not 0 <= probability < 1:
            raise ValueError(f"dropout probability must be in [0, 1), not {probability}")
        if out is None:
            out = self.empty(x.shape, x.dtype)
        threshold, gain = round(probability * 2**32), 1 / (1 - probability)
        flat_x, flat_out = x.reshape(-1), out.reshape(-1)
        for start in range(0, x.size, 1 << 32):
            part = slice(start, min(start + (1 << 32), x.size))
            count = part.stop - start
            args = (flat_x[part], flat_out[part], count, *spread_key(key, start >> 32), threshold, gain)
            self._elementwise("dropout", count, args, x.dtype)
        return out

    # -- optimizer and sums ------------------------------------------------------------------
    def adamw(
        self, weight: Array, gradient: Array, moment1: Array, moment2: Array, *,
        lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, gradient_scale: float,
        copy: Array | None = None,
    ) -> None:
        """As the protocol says; `copy` (m,), if given, gets the new weights in its own type in the same pass."""
        root = math.sqrt(1 - beta2**step)
        rate = lr * root / (1 - beta1**step)
        args = (weight, gradient, moment1, moment2, 0 if copy is None else copy, weight.size,
                float(1 - lr * weight_decay), float(rate), float(beta1), float(beta2), float(eps * root), float(gradient_scale))
        self._elementwise("adamw", weight.size, args, weight.dtype, gradient.dtype,
                          weight.dtype if copy is None else copy.dtype)

    def blend(self, out: Array, x: Array, keep: float, share: float) -> None:
        self._elementwise("blend", out.size, (out, x, out.size, float(keep), float(share)), out.dtype, x.dtype)

    def round_at_random(self, x: Array, out: Array, key: tuple[int, int], start: int) -> None:
        spread = spread_key(key, start >> 32)
        self._elementwise("round_at_random", x.size, (x, out, x.size, start & 0xFFFFFFFF, *spread), x.dtype)

    def sum_of_squares(self, x: Array) -> Array:
        blocks = max(1, min(SUM_BLOCKS, -(-x.size // 1024)))
        partial = self.empty(blocks, np.float64)
        self.launch("square_sum", (blocks,), 256, (x, partial, x.size), x.dtype)
        return self._total(partial)

    def _total(self, parts: Array) -> Array:
        """The sum of a flat array: a 0-d float64 array, which `read` reads."""
        out = self.empty(1, np.float64)
        self.launch("total", (1,), 256, (parts, out, parts.size), np.float32, parts.dtype)
        return out.reshape(())

    def ordered_sum(self, parts: Sequence[Array], out: Array, accumulate: bool) -> None:
        matrix: Array = parts
        if isinstance(parts, list | tuple):  # the kernel wants one matrix
            matrix = self.empty((len(parts), out.size), parts[0].dtype)
            for line, part in zip(matrix, parts, strict=True):
                line[...] = part
        args = (matrix, out, len(matrix), out.size, accumulate)
        self._elementwise("ordered_sum", out.size, args, out.dtype, matrix.dtype)

    def _rows(self, kernel: str, rows: int, d: int, arrays: tuple[Any, ...], *types: Any, more: tuple[Any, ...] = ()) -> None:
        """Launch a kernel whose blocks take rows of d elements in turn."""
        if rows and d:
            self.launch(kernel, (min(rows, 1 << 16),), _row_threads(d), (*arrays, rows, d, *more), *types)


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which arrays of `dtype` are summed."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _rows(x: Array) -> tuple[int, int]:
    """(rows, d) of x (..., d)."""
    d = x.shape[-1]
    return (x.size // d if d else 0), d


def _row_threads(d: int) -> int:
    """Threads of a block that works on rows of d elements: whole warps, at most 256, about eight elements a thread."""
    return min(256, max(1, -(-d // 256)) * 32)
