"""A strict stand-in for the slice of CuPy that the device uses, on a machine without a GPU.

It is as late as a GPU may be: work issued on a stream runs only when that stream, or an event after it, is
synchronised. Whoever forgets to wait reads poison. The kernels that run are the project's own CUDA sources, compiled
for the CPU. An error is:

- work that runs while older work of another stream, on the same memory, has not: nothing ordered the two;
- memory given to MPI (`__cuda_array_interface__`) while work on it is still to come;
- a NumPy array where a CuPy array belongs, or the other way round; any implicit copy, conversion or arithmetic;
- an argument of a kernel that is not exactly what its C signature says;
- whatever is not defined here. `test_lazy_cupy.py` holds the names and arguments against the real library's.

Memory is filled with 0xFF bytes (NaN) when it is allocated, and again, in stream order, when it is used anew.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from mpshard.device import cupy_source
from tests.device import cuda_on_cpu
from tests.device.lazy_arrays import (
    CLOCK,
    POOL,
    Event,
    MemoryPointer,
    MemoryPool,
    Range,
    Stream,
    UnownedMemory,
    alloc_pinned_memory,
    at,
    concatenate,
    get_elapsed_time,
    ndarray,
    stream_of_work,
)


# -- kernels ---------------------------------------------------------------------------------
class RawModule:
    def __init__(self, code: str, *, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self.code, self.options = code, tuple(option for option in options if option not in cupy_source.NVRTC_OPTIONS)

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self, name)


_SCALARS = {"long long": (int, ctypes.c_longlong), "double": (float, ctypes.c_double), "bool": (bool, ctypes.c_bool)}
_POINTED = {c: np.dtype(name) for c, name in (("int", "int32"), ("unsigned", "uint32"), ("unsigned char", "uint8"),
                                             ("long long", "int64"), *((c, name) for name, c in cupy_source.C_TYPES.items()))}


class RawKernel:
    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, module: RawModule, name: str) -> None:
        self._module, self._name, self._parameters = module, name, cupy_source.parameters(name)
        chosen = dict(option[2:].split("_IS=") for option in module.options if "_IS=" in option)
        self._types = {"T": chosen["T"], "U": chosen.get("U", chosen["T"]), "V": chosen.get("V", chosen["T"])}
        self._types["A"] = "double" if chosen["T"] == "double" else "float"

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0) -> None:
        if len(args) != len(self._parameters):
            raise TypeError(f"{self._name} takes {len(self._parameters)} arguments, not {len(args)}")
        if not all(type(n) is int and 0 < n for n in (*grid, *block)) or max(block) > 1024 or max((0, *grid[1:])) > 65535:
            raise ValueError(f"{self._name} cannot be launched with grid {grid}, block {block}")
        if shared_mem > self.max_dynamic_shared_size_bytes or shared_mem > 227 << 10:
            raise ValueError(f"{self._name} has not been allowed {shared_mem} bytes of shared memory")
        values, ranges = [], []
        for arg, (kind, name) in zip(args, self._parameters, strict=True):
            value, touched = self._argument(arg, kind, name)
            values.append(value)
            ranges += touched
        code, options = self._module.code, self._module.options
        stream_of_work()._issue(self._name, ranges, lambda: cuda_on_cpu.run(self._name, code, options, grid, block[0], shared_mem, values))

    def _argument(self, arg: Any, kind: str, name: str) -> tuple[Any, list[Range]]:
        where = f"{self._name}, argument {name}"
        if not kind.endswith("*"):
            python, c = _SCALARS[kind]
            if type(arg) is not python:
                raise TypeError(f"{where}: {type(arg).__name__} is not {python.__name__}, which CuPy makes {kind} of")
            return c(arg), []
        if type(arg) is int and arg == 0:
            return ctypes.c_void_p(None), []
        base = kind.removeprefix("const ").removesuffix("*")
        wanted = _POINTED[self._types.get(base, base)]
        if not isinstance(arg, ndarray) or arg.dtype != wanted:
            raise TypeError(f"{where}: {type(arg).__name__} {getattr(arg, 'dtype', '')} is not a CuPy array of {wanted}")
        if arg._span != arg.nbytes:
            raise TypeError(f"{where}: a kernel sees no strides, but the array is not contiguous")
        return ctypes.c_void_p(arg.data.ptr), arg._touched(not kind.startswith("const"))


# -- cuBLAS ----------------------------------------------------------------------------------
_CUDA_TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}


def gemmEx(handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
           B: int, Btype: int, ldb: int, beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int) -> None:
    """C (m, n) = alpha op(A) op(B) + beta C, all matrices column by column; cublasGemmEx of the cuBLAS manual."""
    def matrix(address: int, kind: int, rows: int, columns: int, ld: int) -> tuple[np.ndarray, Range]:
        dtype = np.dtype(_CUDA_TYPES[kind])
        if ld < rows:
            raise ValueError(f"cuBLAS refuses a leading dimension of {ld} for {rows} rows")
        nbytes = ((columns - 1) * ld + rows) * dtype.itemsize
        strides = (dtype.itemsize, ld * dtype.itemsize)
        return np.ndarray((rows, columns), dtype, at(address, nbytes), 0, strides), (address, address + nbytes, False)

    a, range_a = matrix(A, Atype, *((k, m) if transa else (m, k)), lda)
    b, range_b = matrix(B, Btype, *((n, k) if transb else (k, n)), ldb)
    c, range_c = matrix(C, Ctype, m, n, ldc)
    if Atype != Btype or Ctype not in (Atype, 1 if Atype == 1 else 0) or (computeType == CUBLAS_COMPUTE_64F) != (Ctype == 1):
        raise ValueError(f"cuBLAS has no product of types {Atype}, {Btype} into {Ctype} with arithmetic {computeType}")
    wide = np.float64 if Ctype == 1 else np.float32
    factors = [float(at(address, np.dtype(wide).itemsize).view(wide)[0]) for address in (alpha, beta)]

    def run() -> None:
        product = (a.T if transa else a).astype(wide) @ (b.T if transb else b).astype(wide) * factors[0]
        c[...] = product + c.astype(wide) * factors[1] if factors[1] else product

    stream_of_work()._issue("gemmEx", [range_a, range_b, (*range_c[:2], True)], run)


CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT = 68, 70, 77, -1

# -- as modules ------------------------------------------------------------------------------
def get_default_memory_pool() -> MemoryPool:
    return POOL


def getDeviceCount() -> int:
    return 1


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {"name": b"no GPU at all"}


def get_cublas_handle() -> int:
    return 1


class Device:
    def __init__(self, device: int | None = None) -> None:
        if device != 0:
            raise RuntimeError(f"there is no GPU {device}")

    def use(self) -> None:
        pass


# What each module of the stand-in holds; the test of names walks through it.
MODULES: dict[str, dict[str, Any]] = {
    "cupy": {"ndarray": ndarray, "concatenate": concatenate, "RawModule": RawModule, "RawKernel": RawKernel,
             "get_default_memory_pool": get_default_memory_pool},
    "cupy.cuda": {"Stream": Stream, "Event": Event, "Device": Device, "MemoryPool": MemoryPool, "MemoryPointer": MemoryPointer,
                  "UnownedMemory": UnownedMemory, "alloc_pinned_memory": alloc_pinned_memory,
                  "get_elapsed_time": get_elapsed_time},
    "cupy.cuda.runtime": {"is_hip": False, "getDeviceCount": getDeviceCount, "getDeviceProperties": getDeviceProperties},
    "cupy.cuda.device": {"get_cublas_handle": get_cublas_handle},
    "cupy_backends": {}, "cupy_backends.cuda": {}, "cupy_backends.cuda.libs": {},
    "cupy_backends.cuda.libs.cublas": {
        "gemmEx": gemmEx, "CUBLAS_COMPUTE_32F": CUBLAS_COMPUTE_32F, "CUBLAS_COMPUTE_64F": CUBLAS_COMPUTE_64F,
        "CUBLAS_COMPUTE_32F_FAST_TF32": CUBLAS_COMPUTE_32F_FAST_TF32, "CUBLAS_GEMM_DEFAULT": CUBLAS_GEMM_DEFAULT},
}


@contextmanager
def instead(modules: dict[str, dict[str, Any]], ours: Callable[[str], bool]) -> Iterator[None]:
    """While this is open, modules are made of `modules`, and those whose names are `ours`, theirs and their users', are
    imported afresh."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    for name, content in modules.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(content)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


@contextmanager
def installed() -> Iterator[None]:
    """While this is open, `import cupy` finds the stand-in."""
    with instead(MODULES, lambda name: name.startswith(("cupy", "mpshard.device.cupy_")) and "source" not in name):
        CLOCK.__init__()  # type: ignore[misc]
        yield
