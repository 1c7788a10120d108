"""Products of bfloat16 matrices on the CPU, which NumPy's BLAS has not: `cblas_gemm_bf16bf16f32` of Intel's MKL.

Where the processor multiplies bfloat16 (avx512_bf16, amx_bf16) and MKL knows it, they are up to twice as fast as
float32's. Inputs are rounded to bfloat16, sums are float32: the arithmetic that a GPU does with precision.param=bf16.
MKL does not use these instructions on every processor that has them, and does not tell; so it is tried out.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpshard.device.blas import blas_info, cpu_flags
from mpshard.device.numpy_memory import NumpyMemory
from mpshard.device.numpy_update import BF16, round_to_bf16

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # CBLAS's enumerations
GAIN = 1.3  # times float32's speed, from which it pays to round the inputs
_TRIAL = 768  # rows and columns of a product to try: about 10 ms
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}  # without them MKL emulates, slower than float32


@cache
def find() -> Callable[..., None] | str:
    """MKL's product, if it is worth using here; or why not, in one line."""
    product = load()
    if isinstance(product, str):
        return product
    memory, a, out = NumpyMemory(), np.ones((_TRIAL, _TRIAL), np.float32), np.empty((_TRIAL, _TRIAL), np.float32)
    gain = _best_time(lambda: np.matmul(a, a, out=out)) / _best_time(lambda: matmul(product, memory, a, a, out, False))
    return product if gain >= GAIN else f"MKL multiplies bfloat16 at {gain:.2f} times float32's speed on this processor"


def _best_time(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


@cache
def load() -> Callable[..., None] | str:
    """MKL's product, with as many threads as NumPy's BLAS has; or why there is none, in one line."""
    if not _INSTRUCTIONS & cpu_flags():
        return "this processor has no bfloat16 arithmetic"
    folder = Path(sys.prefix) / "lib"  # where the wheels put it
    libraries = sorted(folder.glob("libmkl_rt.so.*"))
    if not libraries:
        return "MKL is not installed (pip install 'mpshard[mkl]')"
    try:
        ctypes.CDLL(str(folder / "libiomp5.so"), ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(libraries[-1]))
        product = library.cblas_gemm_bf16bf16f32
    except (OSError, AttributeError) as error:
        return f"MKL cannot be loaded: {error}"
    word, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    product.argtypes = [word] * 6 + [real, pointer, word, pointer, word, real, pointer, word]
    product.restype = None
    library.MKL_Set_Num_Threads(blas_info().threads)
    return product


def matmul(product: Callable[..., None], memory: NumpyMemory, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out = or += a @ b: a (m, k), b (k, n), out (m, n), all float32; a and b rounded to bfloat16."""
    if out.strides[1] != out.itemsize:
        whole = memory.empty(out.shape, out.dtype)
        matmul(product, memory, a, b, whole, False)
        np.add(out, whole, out=out) if accumulate else np.copyto(out, whole)
        return
    if not (a.size and b.size):
        if not accumulate:
            out.fill(0)
        return
    (a_words, a_way), (b_words, b_way) = (_rounded(memory, x) for x in (a, b))
    product(_ROW_MAJOR, a_way, b_way, *out.shape, a.shape[1], 1.0, a_words.ctypes.data, a_words.shape[1],
            b_words.ctypes.data, b_words.shape[1], float(accumulate), out.ctypes.data, out.strides[0] // out.itemsize)


def _rounded(memory: NumpyMemory, x: np.ndarray) -> tuple[np.ndarray, int]:
    """x in bfloat16, row by row or, if that is how it lies, column by column; which of the two."""
    way = _PLAIN
    if not x.flags.c_contiguous and x.T.flags.c_contiguous:
        x, way = x.T, _TRANSPOSED
    words = memory.empty(x.shape, BF16)
    round_to_bf16(memory, np.ascontiguousarray(x), words)
    return words, way
