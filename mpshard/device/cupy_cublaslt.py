"""Products by cuBLASLt, through NVIDIA's `nvmath-python`, for the CuPy device: those that cuBLAS has not.

Products with an epilogue, which adds a bias, takes a GELU or multiplies with its derivative before the product is written, where
cuBLAS would write it and a kernel read and write it once more, or which sums a gradient that the product reads anyway. Products
of 8 bits, with a scale for each matrix that stays on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from cupy_backends.cuda.libs import cublas
from nvmath.bindings import cublasLt

from mpshard.device.base import Array
from mpshard.device.cupy_device import CupyDevice
from mpshard.device.cupy_fp8 import Fp8Matrix
from mpshard.device.cupy_memory import orientation
from mpshard.device.cupy_source import CUDA_TYPES

WORKSPACE = 32 << 20  # bytes, at most: what NVIDIA advises for Hopper
FP8_TYPES = CUDA_TYPES["float8_e4m3fn"], CUDA_TYPES["float8_e5m2"]
LINE = 16  # bytes of which rows of 8-bit matrices, and addresses, must be multiples
AUX_LINE = 8  # elements of which rows of what a GELU is taken of must be multiples
# How exactly the library takes a GELU is not said, and does not show in these formats. Products of float32, without TF32, take so
# long that a kernel's pass hardly counts.
GELU_TYPES = "float16", "bfloat16"

Epilogue = cublasLt.Epilogue
ADDS_BIAS = Epilogue.BIAS, Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS
WITH_GELU = Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS, Epilogue.DGELU
WITH_VECTOR = *ADDS_BIAS, Epilogue.BGRADA, Epilogue.BGRADB  # the bias, read, or its gradient, written
WITH_MATRIX = Epilogue.GELU_AUX_BIAS, Epilogue.DGELU  # what GELU is taken of, written or read: the "auxiliary buffer"


@dataclass(frozen=True)
class Case:
    """What an algorithm is chosen for: (m, k) @ (k, n).

    a, b: is the matrix a transposed view?, elements from one line to the next. types: cudaDataType's of a, b, the result.
    alignments: bytes of which the addresses of a, b, the result are multiples.
    """

    m: int
    n: int
    k: int
    a: tuple[int, int]
    b: tuple[int, int]
    types: tuple[int, int, int]
    alignments: tuple[int, int, int]
    tf32: bool = False
    epilogue: int = Epilogue.DEFAULT
    accumulate: bool = False


class Product:
    """A described product and the algorithm that cuBLASLt would take; ValueError where it has none.

    Like cuBLAS it thinks in columns: row by row a @ b is column by column (b' a')', so b comes first, and the bias has one element
    for each row. For the same reason its BGRADA sums over our b, its BGRADB over our a.

    scale: an address of one, for what has scales: which are told at each run.
    """

    def __init__(self, handle: int, case: Case, scale: int = 0) -> None:
        self.epilogue, self.accumulates = case.epilogue, case.accumulate
        (m, n, k), a, b, (type_a, type_b, type_out) = (case.m, case.n, case.k), case.a, case.b, case.types
        self.description = cublasLt.matmul_desc_create(
            cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if case.tf32 else cublas.CUBLAS_COMPUTE_32F, CUDA_TYPES["float32"])
        attribute = cublasLt.MatmulDescAttribute
        # FAST_ACCUM stays off: with it sums of 8 bits are kept in fewer than float32's.
        for name, value in ((attribute.TRANSA, b[0]), (attribute.TRANSB, a[0]), (attribute.EPILOGUE, case.epilogue)):
            self._describe(name, np.array([value], np.int32))
        # The search reads of addresses how well they are aligned, and refuses a matrix that is nowhere. All that come are as
        # well aligned as this one, which is nobody's.
        if case.epilogue in WITH_VECTOR:
            self._describe(attribute.BIAS_DATA_TYPE, np.array([type_out], np.int32))
            self._describe(attribute.BIAS_POINTER, np.array([LINE], np.uint64))
        if case.epilogue in WITH_MATRIX:
            self._describe(attribute.EPILOGUE_AUX_LD, np.array([n], np.int64))
            self._describe(attribute.EPILOGUE_AUX_POINTER, np.array([LINE], np.uint64))
        if scale:
            self.describe_scales(scale, scale)
        self.layouts = [cublasLt.matrix_layout_create(type_b, *((k, n) if b[0] else (n, k)), b[1]),
                        cublasLt.matrix_layout_create(type_a, *((m, k) if a[0] else (k, m)), a[1]),
                        cublasLt.matrix_layout_create(type_out, n, m, n)]
        preference, wanted = cublasLt.matmul_preference_create(), cublasLt.MatmulPreferenceAttribute
        of_a, of_b, of_out = (np.array([alignment], np.uint32) for alignment in case.alignments)
        for name, words in ((wanted.MAX_WORKSPACE_BYTES, np.array([WORKSPACE], np.uint64)), (wanted.MIN_ALIGNMENT_A_BYTES, of_b),
                            (wanted.MIN_ALIGNMENT_B_BYTES, of_a), (wanted.MIN_ALIGNMENT_C_BYTES, of_out),
                            (wanted.MIN_ALIGNMENT_D_BYTES, of_out)):
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

    def describe_scales(self, a: int, b: int) -> None:
        """Where on the GPU the float32 is that each matrix is multiplied with."""
        self._describe(cublasLt.MatmulDescAttribute.A_SCALE_POINTER, np.array([b], np.uint64))
        self._describe(cublasLt.MatmulDescAttribute.B_SCALE_POINTER, np.array([a], np.uint64))

    @property
    def adds_bias(self) -> bool:
        return self.epilogue == Epilogue.BIAS

    def run(self, library: Library, a: Array, b: Array, out: Array, vector: Array | None = None, matrix: Array | None = None) -> None:
        """vector, matrix: of the epilogue, see `WITH_VECTOR` and `WITH_MATRIX`."""
        device, factors = library.device, library.factors
        if self.epilogue in WITH_VECTOR:
            assert vector is not None
            self._describe(cublasLt.MatmulDescAttribute.BIAS_POINTER, np.array([vector.data.ptr], np.uint64))
        if self.epilogue in WITH_MATRIX:
            assert matrix is not None
            self._describe(cublasLt.MatmulDescAttribute.EPILOGUE_AUX_POINTER, np.array([matrix.data.ptr], np.uint64))
        workspace = device.empty(self.workspace, np.uint8)  # goes back at once: who gets it next runs after on the same stream
        one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
        left, right, to = self.layouts
        # The algorithm is the first member of the structure that the search filled.
        cublasLt.matmul(library.handle, self.description, one, b.data.ptr, left, a.data.ptr, right, one if self.accumulates else zero,
                        out.data.ptr, to, out.data.ptr, to, self.best.ptr, workspace.data.ptr, self.workspace, device.compute.ptr)


class Library:
    """cuBLASLt on a device's compute stream; raises whatever the library raises where it cannot be used: see `cupy_libraries`."""

    def __init__(self, device: CupyDevice) -> None:
        self.device, self.handle = device, cublasLt.create()
        self.about = f"cuBLASLt {cublasLt.get_version()}"
        self.factors = np.array([1, 0], np.float32)  # on the host
        self._known: dict[Case, Product | None] = {}

    def find(self, case: Case, scale: int = 0) -> Product | None:
        """The product, described once; None if cuBLASLt has none."""
        if case not in self._known:
            try:
                self._known[case] = Product(self.handle, case, scale)
            except (ValueError, cublasLt.cuBLASLtError):
                self._known[case] = None
        return self._known[case]


class Products(Library):
    """Products of matrices of one type with an epilogue: with a bias for `Device.matmul`; else `mpshard.device.base.Epilogues`,
    where they are described.

    A bias gradient cuBLASLt sums only over a matrix whose k goes from row to row, as in a linear layer; of vectors, or where k is
    one, it has not all epilogues of backward (what nvmath refuses or its tests leave out). New results lie in memory of their
    own, at multiples of 256 bytes.
    """

    def add_bias(self, a: Array, b: Array, bias: Array, out: Array) -> bool:
        """out (m, n) = a @ b + bias (n,). False if cuBLASLt cannot do it, and nothing was done."""
        product = self._product(Epilogue.BIAS, a, b, out.dtype, _alignment(out), bias)
        if product is not None:
            product.run(self, a, b, out, bias)
        return product is not None

    def gelu(self, a: Array, b: Array, bias: Array, keep: bool) -> tuple[Array, Array | None] | None:
        product = self._product(Epilogue.GELU_AUX_BIAS if keep else Epilogue.GELU_BIAS, a, b, a.dtype, 256, bias)
        if product is None:
            return None
        shape = len(a), b.shape[1]
        kept = self.device.empty(shape, a.dtype) if keep else None
        y = self.device.empty(shape, a.dtype)
        product.run(self, a, b, y, bias, kept)
        return y, kept

    def gelu_backward(self, dy: Array, b: Array, x: Array) -> Array | None:
        product = self._product(Epilogue.DGELU, dy, b, dy.dtype, 256, x)
        if product is None:
            return None
        dx = self.device.empty(x.shape, x.dtype)
        product.run(self, dy, b, dx, matrix=x)
        return dx

    def linear_gradients(self, dy: Array, x: Array, weight: Array, bias: Array, transposed: bool) -> bool:
        a, b, epilogue = (x.T, dy, Epilogue.BGRADA) if transposed else (dy.T, x, Epilogue.BGRADB)
        product = self._product(epilogue, a, b, weight.dtype, _alignment(weight), bias)
        if product is not None:
            product.run(self, a, b, weight, bias)
        return product is not None

    def _product(self, epilogue: int, a: Array, b: Array, dtype: np.dtype[Any], alignment: int, beside: Array) -> Product | None:
        """What makes a result of this type and alignment. beside: the vector, or matrix, that the epilogue reads or writes."""
        (m, k), n = a.shape, b.shape[1]
        least = 1 if epilogue in ADDS_BIAS else 2
        if epilogue in WITH_GELU and a.dtype.name not in GELU_TYPES:
            return None
        if a.dtype != b.dtype or a.dtype == np.float64 or dtype not in (a.dtype, np.float32):
            return None
        if beside.dtype != dtype or beside.data.ptr % LINE or min(m, n, k) < least or (epilogue in WITH_MATRIX and n % AUX_LINE):
            return None
        tf32 = self.device.tf32 and a.dtype == np.float32
        types = CUDA_TYPES[a.dtype.name], CUDA_TYPES[b.dtype.name], CUDA_TYPES[dtype.name]
        return self.find(Case(m, n, k, orientation(a), orientation(b), types, (_alignment(a), _alignment(b), alignment), tf32, epilogue))


class Fp8Products(Library):
    """Products of matrices of 8 bits.

    On Ada and Hopper cuBLASLt takes them only with k contiguous in both, and wants rows and addresses to be multiples of 16
    bytes. It multiplies e4m3 with e4m3 and with e5m2, and adds a bias of the result's type, if that has 16 bits. See the tables
    of cublasLtMatmul in NVIDIA's manual of cuBLAS.
    """

    def __init__(self, device: CupyDevice) -> None:
        super().__init__(device)
        self._one = device.from_host(np.ones(1, np.float32))

    def product(self, shape: tuple[int, int, int], gradients: tuple[bool, bool], out: Array, accumulate: bool,
                bias: Array | None) -> Product | None:
        """How to make out (m, n) from (m, k) and (k, n), or None. shape: m, n, k. gradients: which of the two is e5m2.

        Whether the bias is added on the way the product says, see `Product.adds_bias`.
        """
        m, n, k = shape
        if 0 in shape or n % LINE or k % LINE or all(gradients) or out.dtype == np.float64 or out.data.ptr % LINE:
            return None
        on_the_way = bias is not None and not accumulate and out.itemsize == 2 and bias.dtype == out.dtype and bias.data.ptr % LINE == 0
        types = FP8_TYPES[gradients[0]], FP8_TYPES[gradients[1]], CUDA_TYPES[out.dtype.name]
        alignments = 256, 256, _alignment(out)  # what is rounded lies in memory of its own
        epilogue = Epilogue.BIAS if on_the_way else Epilogue.DEFAULT
        return self.find(Case(m, n, k, (0, k), (1, k), types, alignments, False, epilogue, accumulate), self._one.data.ptr)

    def run(self, product: Product, a: Fp8Matrix, b: Fp8Matrix, bias: Array | None, out: Array) -> None:
        """out (m, n) = or += a (m, k) times the transpose of b (n, k), plus the bias if the product adds it."""
        product.describe_scales(a.scale.data.ptr, b.scale.data.ptr)
        product.run(self, a.words, b.words, out, bias)


def _alignment(array: Array) -> int:
    """Bytes of which its address is a multiple, at most the 256 that cuBLASLt asks about."""
    return min(256, array.data.ptr & -array.data.ptr)
