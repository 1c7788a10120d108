"""A stand-in for the one function of MKL that is used."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np


def cblas(order, a_way, b_way, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """cblas_gemm_bf16bf16f32, row by row."""
    assert order == 101

    def matrix(pointer, rows, columns, ld, dtype):
        nbytes = ((rows - 1) * ld + columns) * np.dtype(dtype).itemsize
        flat = np.frombuffer((ctypes.c_char * nbytes).from_address(pointer), dtype)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (ld * flat.itemsize, flat.itemsize))

    left = matrix(a, *((m, k) if a_way == 111 else (k, m)), lda, ml_dtypes.bfloat16).astype(np.float32)
    right = matrix(b, *((k, n) if b_way == 111 else (n, k)), ldb, ml_dtypes.bfloat16).astype(np.float32)
    out = matrix(c, m, n, ldc, np.float32)
    out[:] = alpha * ((left if a_way == 111 else left.T) @ (right if b_way == 111 else right.T)) + (beta * out if beta else 0)
