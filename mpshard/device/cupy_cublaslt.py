"""Products with a bias by cuBLASLt, through NVIDIA's `nvmath-python`, for the CuPy device: the bias is added before the product is
written, where cuBLAS would write it and a kernel read and write it once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cupy_backends.cuda.libs import cublas
from nvmath.bindings import cublasLt

from mpshard.device.base import Array
from mpshard.device.cupy_memory import CupyMemory
from mpshard.device.cupy_source import CUDA_TYPES

WORKSPACE = 32 << 20  # bytes, at most: what NVIDIA advises for Hopper


class Product:
    """A described product (m, k) @ (k, n) and the algorithm that cuBLASLt would take; ValueError where it has none.

    Like cuBLAS it thinks in columns: row by row a @ b is column by column (b' a')', so b comes first, and the bias has one element
    for each row.
    """

    def __init__(self, handle: int, m: int, n: int, k: int, a: tuple[int, int], b: tuple[int, int], dtype: str, tf32: bool,
                 alignments: tuple[int, int]) -> None:
        kind = CUDA_TYPES[dtype]
        self.description = cublasLt.matmul_desc_create(
            cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if tf32 else cublas.CUBLAS_COMPUTE_32F, CUDA_TYPES["float32"])
        attribute = cublasLt.MatmulDescAttribute
        for name, value in ((attribute.TRANSA, b[0]), (attribute.TRANSB, a[0]), (attribute.EPILOGUE, cublasLt.Epilogue.BIAS),
                            (attribute.BIAS_DATA_TYPE, kind)):
            self._describe(name, np.array([value], np.int32))
        self.layouts = [cublasLt.matrix_layout_create(kind, *((k, n) if b[0] else (n, k)), b[1]),
                        cublasLt.matrix_layout_create(kind, *((m, k) if a[0] else (k, m)), a[1]),
                        cublasLt.matrix_layout_create(kind, n, m, n)]
        preference, wanted = cublasLt.matmul_preference_create(), cublasLt.MatmulPreferenceAttribute
        for name, words in ((wanted.MAX_WORKSPACE_BYTES, np.array([WORKSPACE], np.uint64)),
                            (wanted.MIN_ALIGNMENT_A_BYTES, np.array([alignments[1]], np.uint32)),
                            (wanted.MIN_ALIGNMENT_B_BYTES, np.array([alignments[0]], np.uint32))):
            cublasLt.matmul_preference_set_attribute(preference, int(name), words.ctypes.data, words.nbytes)
        left, right, out = self.layouts
        self.best, count = cublasLt.MatmulHeuristicResult(1), np.zeros(1, np.int32)
        cublasLt.matmul_algo_get_heuristic(handle, self.description, left, right, out, out, preference, 1, self.best.ptr,
                                           count.ctypes.data)
        cublasLt.matmul_preference_destroy(preference)
        if not count[0]:
            raise ValueError("cuBLASLt has no algorithm for it")
        self.workspace = max(1, int(self.best.workspace_size))

    def _describe(self, attribute: Any, words: np.ndarray) -> None:
        cublasLt.matmul_desc_set_attribute(self.description, int(attribute), words.ctypes.data, words.nbytes)

    def run(self, device: CupyMemory, handle: int, factors: np.ndarray, a: Array, b: Array, bias: Array, out: Array) -> None:
        self._describe(cublasLt.MatmulDescAttribute.BIAS_POINTER, np.array([bias.data.ptr], np.uint64))
        workspace = device.empty(self.workspace, np.uint8)  # goes back at once: who gets it next runs after on the same stream
        one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
        left, right, to = self.layouts
        # The algorithm is the first member of the structure that the search filled.
        cublasLt.matmul(handle, self.description, one, b.data.ptr, left, a.data.ptr, right, zero, out.data.ptr, to, out.data.ptr, to,
                        self.best.ptr, workspace.data.ptr, self.workspace, device.compute.ptr)


class Products:
    """cuBLASLt on a device's compute stream; raises whatever the library raises where it cannot be used: see `cupy_libraries`."""

    def __init__(self, device: CupyMemory) -> None:
        self.device, self.handle = device, cublasLt.create()
        self.about = f"cuBLASLt {cublasLt.get_version()}"
        self._factors = np.array([1, 0], np.float32)
        self._known: dict[tuple[Any, ...], Product | None] = {}

    def run(self, a: Array, b: Array, bias: Array, out: Array, turned_a: tuple[int, int], turned_b: tuple[int, int],
            tf32: bool) -> bool:
        """out (m, n) = a @ b + bias. turned: is the matrix a transposed view?, elements from one line to the next.

        False if cuBLASLt cannot do it, and nothing was done.
        """
        (m, k), n, dtype = a.shape, b.shape[1], a.dtype.name
        if len({x.dtype for x in (a, b, bias, out)}) > 1 or dtype == "float64" or 0 in (m, n, k) or bias.data.ptr % 16:
            return False
        alignments = _alignment(a), _alignment(b)
        key = (m, n, k, turned_a, turned_b, dtype, tf32 and dtype == "float32", alignments)
        if key not in self._known:
            try:
                self._known[key] = Product(self.handle, *key)
            except (ValueError, cublasLt.cuBLASLtError):
                self._known[key] = None
        product = self._known[key]
        if product is not None:
            product.run(self.device, self.handle, self._factors, a, b, bias, out)
        return product is not None


def _alignment(array: Array) -> int:
    """Bytes of which its address is a multiple, at most the 256 that cuBLASLt asks about."""
    return min(256, array.data.ptr & -array.data.ptr)
