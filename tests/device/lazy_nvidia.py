"""Stand-ins for what the device uses of cuDNN's frontend and of nvmath's cublasLt, on top of `lazy_cupy`: as late as that, on the
stream that they are told, and as strict. Where a matrix lies they know, like the real ones, from what was described to them alone.

`test_gpu_libraries.py` holds the names and arguments against the real packages'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from mpshard.device.numpy_device import NumpyDevice
from tests.device.lazy_arrays import CLOCK, POOL, Range, Stream, at
from tests.device.lazy_cupy import _CUDA_TYPES, instead

EXACT = NumpyDevice()
WIDEST = 128  # elements of a head that cuDNN takes
CAPABILITY = 90  # of the GPU, as in sm_90
calls: list[str] = []  # what the libraries were asked to do


def _stream(address: int) -> Stream:
    return next(stream for stream in CLOCK.streams if stream.ptr == address)


def _range(address: int, nbytes: int, written: bool) -> Range:
    return address, address + nbytes, written


# -- cuDNN -----------------------------------------------------------------------------------
class cudnnGraphNotSupportedError(Exception):
    pass


data_type = SimpleNamespace(HALF=np.dtype(np.float16), BFLOAT16=np.dtype(ml_dtypes.bfloat16), FLOAT=np.dtype(np.float32))
heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")


class _Handle:
    stream: Stream | None = None


def create_handle() -> _Handle:
    return _Handle()


def set_stream(handle: _Handle, stream: int) -> None:
    handle.stream = _stream(stream)


def backend_version_string() -> str:
    return "0.0"


class tensor:
    def __init__(self, name: str, dim: list[int] | None, stride: list[int] | None, kind: np.dtype | None, virtual: bool) -> None:
        self.name, self.dim, self.stride, self.kind, self.virtual = name, dim, stride, kind, virtual

    def set_output(self, value: bool) -> tensor:
        self.virtual = not value
        return self

    def set_dim(self, dim: list[int]) -> tensor:
        self.dim = list(dim)
        return self

    def set_stride(self, stride: list[int]) -> tensor:
        self.stride = list(stride)
        return self

    def set_data_type(self, dtype: Any) -> tensor:
        self.kind = dtype
        return self

    def at(self, address: int) -> np.ndarray:
        assert self.dim is not None and self.stride is not None and self.kind is not None
        if address % 16:
            raise ValueError(f"{self.name} is at {address:#x}, which is not a multiple of 16")
        span = sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True)) + 1
        strides = tuple(s * self.kind.itemsize for s in self.stride)
        return np.ndarray(self.dim, self.kind, at(address, span * self.kind.itemsize), 0, strides)


class pygraph:
    def __init__(self, *, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: _Handle) -> None:
        assert intermediate_data_type == compute_data_type == data_type.FLOAT
        self._kind, self._handle, self._tensors, self._built = io_data_type, handle, [], False

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: Any) -> Any:
        return self._add(name, dim, stride, data_type, virtual=False)

    def _add(self, name: str, dim: Any, stride: Any, kind: Any, virtual: bool) -> Any:
        self._tensors.append(tensor(name, dim, stride, kind, virtual))
        return self._tensors[-1]

    def sdpa(self, *, name: str, q: Any, k: Any, v: Any, is_inference: bool, attn_scale: float, use_causal_mask: bool) -> list[Any]:
        assert use_causal_mask and not is_inference
        y = self._add("y", q.dim, None, self._kind, virtual=True)
        stats = [*q.dim[:3], 1]
        lse = self._add("lse", stats, [stats[1] * stats[2], stats[2], 1, 1], None, virtual=True)
        self._work = name, lambda at: _forward(at, q, k, v, y, lse, attn_scale)
        return [y, lse]

    def sdpa_backward(self, *, name: str, q: Any, k: Any, v: Any, o: Any, dO: Any, stats: Any, attn_scale: float, use_causal_mask: bool,
                      use_deterministic_algorithm: bool) -> list[Any]:
        assert use_causal_mask and use_deterministic_algorithm
        made = [self._add(f"d{x.name}", x.dim, None, self._kind, virtual=True) for x in (q, k, v)]
        self._work = name, lambda at: _backward(at, q, k, v, o, dO, stats, made, attn_scale)
        return made

    def build(self, heuristics: list[str]) -> None:
        width = self._tensors[0].dim[3]
        if width % 8 or width > WIDEST:
            raise cudnnGraphNotSupportedError(f"heads of {width}")
        self._built = True

    def get_workspace_size(self) -> int:
        assert self._built
        return 1000

    def execute(self, tensor_dict: dict[Any, int], workspace: int, handle: _Handle) -> None:
        if handle is not self._handle or handle.stream is None or not self._built:
            raise RuntimeError("a graph runs on the handle it was made for, which has a stream, once it is built")
        if set(tensor_dict) != {x for x in self._tensors if not x.virtual}:
            raise RuntimeError("a graph wants an address for each input and output")
        arrays, space, (name, work) = {x: x.at(address) for x, address in tensor_dict.items()}, at(workspace, 1000), self._work
        calls.append(name)

        def run() -> None:
            space.fill(0xFF)
            work(arrays)

        written = self._tensors[3 if name == "attention" else 6:]
        ranges = [_range(address, (sum((n - 1) * s for n, s in zip(x.dim, x.stride, strict=True)) + 1) * x.kind.itemsize, x in written)
                  for x, address in tensor_dict.items()]
        handle.stream._issue(name, [*ranges, _range(workspace, 1000, True)], run)


def _packed(*parts: np.ndarray) -> np.ndarray:
    """(b, heads, t, e) each to rows (b, t, all heads e) in float64."""
    rows = np.concatenate([part.astype(np.float64) for part in parts], axis=1).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(rows).reshape(*rows.shape[:2], -1)


def _unpacked(rows: np.ndarray, *parts: np.ndarray) -> None:
    heads = rows.reshape(*rows.shape[:2], -1, parts[0].shape[3]).transpose(0, 2, 1, 3)
    for part in parts:
        part[...], heads = heads[:, :part.shape[1]], heads[:, part.shape[1]:]


def _forward(at: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, scale: float) -> None:
    rows, sums = EXACT.attention(_packed(at[q], at[k], at[v]), q.dim[1], k.dim[1], scale)
    _unpacked(rows, at[y])
    at[lse][..., 0] = sums


def _backward(at: Any, q: Any, k: Any, v: Any, y: Any, dy: Any, lse: Any, made: list[Any], scale: float) -> None:
    sums = np.ascontiguousarray(at[lse][..., 0].astype(np.float64))
    rows = EXACT.attention_backward(_packed(at[dy]), _packed(at[q], at[k], at[v]), _packed(at[y]), sums, q.dim[1], k.dim[1], scale)
    _unpacked(rows, *(at[x] for x in made))


# -- cuBLASLt --------------------------------------------------------------------------------
class cuBLASLtError(Exception):
    pass


class MatmulDescAttribute(IntEnum):
    TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, EPILOGUE_AUX_POINTER, EPILOGUE_AUX_LD = 3, 4, 7, 8, 11, 12
    A_SCALE_POINTER, B_SCALE_POINTER, BIAS_DATA_TYPE = 17, 18, 26


SCALES = (MatmulDescAttribute.A_SCALE_POINTER, MatmulDescAttribute.B_SCALE_POINTER)
LONG = (MatmulDescAttribute.BIAS_POINTER, MatmulDescAttribute.EPILOGUE_AUX_POINTER, MatmulDescAttribute.EPILOGUE_AUX_LD, *SCALES)


class MatmulPreferenceAttribute(IntEnum):
    MAX_WORKSPACE_BYTES, MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES, MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = 1, 5, 6, 7, 8


class Epilogue(IntEnum):
    DEFAULT, BIAS, GELU_BIAS, GELU_AUX_BIAS, DGELU, BGRADA, BGRADB = 1, 4, 36, 164, 192, 256, 512


ADDS_BIAS = (Epilogue.BIAS, Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS)
SUMS = (Epilogue.BGRADA, Epilogue.BGRADB)
WITH_AUX = (Epilogue.GELU_AUX_BIAS, Epilogue.DGELU)
BESIDE = (MatmulDescAttribute.BIAS_POINTER, MatmulDescAttribute.EPILOGUE_AUX_POINTER)
CALLED = {Epilogue.DEFAULT: "", Epilogue.BIAS: " with a bias", Epilogue.GELU_BIAS: " with a bias and GELU",
          Epilogue.GELU_AUX_BIAS: " with a bias and GELU, both kept", Epilogue.DGELU: " with GELU's derivative",
          Epilogue.BGRADA: " with a bias gradient", Epilogue.BGRADB: " with a bias gradient"}


FP8 = {28: ml_dtypes.float8_e4m3fn, 29: ml_dtypes.float8_e5m2}  # cudaDataType's


class MatmulHeuristicResult:
    def __init__(self, size: int = 1) -> None:
        self._words, self.workspace_size = np.zeros(16, np.int64), 0
        self.ptr = self._words.ctypes.data
        _RESULTS[self.ptr] = self


_NUMBERS = count(1)
_OBJECTS: dict[int, dict[Any, Any]] = {}
_RESULTS: dict[int, MatmulHeuristicResult] = {}


def _made(**values: Any) -> int:
    number = next(_NUMBERS)
    _OBJECTS[number] = dict(values)
    return number


def _set(number: int, attr: int, buf: int, size_in_bytes: int) -> None:
    _OBJECTS[number][attr] = int.from_bytes(bytes(at(buf, size_in_bytes)), "little")


def create() -> int:
    return _made()


def get_version() -> int:
    return 0


def matmul_desc_create(compute_type: int, scale_type: int) -> int:
    assert compute_type in (68, 77) and scale_type == 0
    return _made()


def matmul_desc_set_attribute(matmul_desc: int, attr: int, buf: int, size_in_bytes: int) -> None:
    assert size_in_bytes == (8 if MatmulDescAttribute(attr) in LONG else 4)
    _set(matmul_desc, attr, buf, size_in_bytes)


def matrix_layout_create(type: int, rows: int, cols: int, ld: int) -> int:
    assert ld >= rows
    return _made(type=type, kind=np.dtype(_CUDA_TYPES.get(type) or FP8[type]), rows=rows, cols=cols, ld=ld)


def matmul_preference_create() -> int:
    return _made()


def matmul_preference_set_attribute(pref: int, attr: int, buf: int, size_in_bytes: int) -> None:
    assert size_in_bytes == (8 if attr == MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES else 4)
    _set(pref, attr, buf, size_in_bytes)


def matmul_preference_destroy(pref: int) -> None:
    del _OBJECTS[pref]


def matmul_algo_get_heuristic(light_handle: int, operation_desc: int, adesc: int, bdesc: int, cdesc: int, ddesc: int, preference: int,
                              requested_algo_count: int, heuristic_results_array: int, return_algo_count: int) -> None:
    wanted, description = _OBJECTS[preference], _OBJECTS[operation_desc]
    assert cdesc == ddesc
    a, b, d = (_OBJECTS[number] for number in (adesc, bdesc, ddesc))
    alignments = [wanted[MatmulPreferenceAttribute(number)] for number in (5, 6, 7, 8)]
    if why := _unsupported(description, a, b, d, alignments):
        raise cuBLASLtError(f"CUBLAS_STATUS_NOT_SUPPORTED ({why})")
    description["alignments"] = alignments
    description["searched"] = {name: _alignment(description[name]) for name in BESIDE if name in description}
    _RESULTS[heuristic_results_array].workspace_size = 1000
    at(return_algo_count, 4).view(np.int32)[0] = requested_algo_count


def _alignment(address: int) -> int:
    return address & -address


def _unsupported(description: dict[Any, Any], a: dict[str, Any], b: dict[str, Any], d: dict[str, Any], alignments: list[int]) -> str:
    """Why there is no such product, by the tables of the manual; those of 8 bits on Hopper."""
    types, epilogue = (a["type"], b["type"], d["type"]), Epilogue(description.get(MatmulDescAttribute.EPILOGUE, 1))
    k = a["rows" if description[MatmulDescAttribute.TRANSA] else "cols"]
    bias = epilogue in ADDS_BIAS or epilogue in SUMS
    bias_type = description[MatmulDescAttribute.BIAS_DATA_TYPE] if bias else d["type"]
    # nvmath gives an address, if none that is right, before it asks for an algorithm: "to bypass the cuBLAS check".
    assert epilogue not in WITH_AUX or description[MatmulDescAttribute.EPILOGUE_AUX_POINTER]
    aux_line = description[MatmulDescAttribute.EPILOGUE_AUX_LD] if epilogue in WITH_AUX else 0
    if aux_line % 8 or aux_line < (d["rows"] if epilogue in WITH_AUX else 0):
        return f"auxiliary lines of {aux_line} elements"
    if epilogue == Epilogue.BGRADA and description[MatmulDescAttribute.TRANSA] or \
            epilogue == Epilogue.BGRADB and not description[MatmulDescAttribute.TRANSB]:
        return "a bias gradient over lines"
    if k == 1 and epilogue in (Epilogue.DGELU, *SUMS):
        return "k of one"
    if not any(kind in FP8 for kind in types):
        if types[0] != types[1] or d["type"] not in (types[0], 0) or bias_type != d["type"]:
            return f"types {types}, bias {bias_type}"
        return "scales of what has none" if any(scale in description for scale in SCALES) else ""
    if epilogue not in (Epilogue.DEFAULT, Epilogue.BIAS):
        return f"8 bits with {epilogue.name}"
    if CAPABILITY < 89:
        return f"8 bits on sm_{CAPABILITY}"
    if not (a["type"] in FP8 and b["type"] in FP8) or a["type"] == b["type"] == 29 or d["type"] not in (0, 2, 14):
        return f"types {types}"
    if (description[MatmulDescAttribute.TRANSA], description[MatmulDescAttribute.TRANSB]) != (1, 0):
        return "8 bits not as TN"
    if bias and bias_type != (14 if d["type"] == 0 else d["type"]):
        return f"a bias of type {bias_type}"
    lines = a["ld"], b["ld"], d["ld"] * d["kind"].itemsize
    return f"lines of {lines} bytes, addresses of {alignments}" if any(n % 16 for n in (*lines, *alignments)) else ""


def matmul(light_handle: int, compute_desc: int, alpha: int, a: int, adesc: int, b: int, bdesc: int, beta: int, c: int, cdesc: int,
           d: int, ddesc: int, algo: int, workspace: int, workspace_size_in_bytes: int, stream: int) -> None:
    description = _OBJECTS[compute_desc]
    assert algo in _RESULTS and c == d
    one, keep = [float(at(address, 4).view(np.float32)[0]) for address in (alpha, beta)]
    assert one == 1 and keep in (0, 1)
    assert workspace_size_in_bytes == 1000 and not any(x % k for x, k in zip((a, b, c, d), description["alignments"], strict=True))

    def matrix(address: int, number: int) -> tuple[np.ndarray, Range]:
        m = _OBJECTS[number]
        return lying(address, m["kind"], m["rows"], m["cols"], m["ld"])

    def lying(address: int, kind: np.dtype, rows: int, columns: int, line: int, written: bool = False) -> tuple[np.ndarray, Range]:
        nbytes = ((columns - 1) * line + rows) * kind.itemsize
        assert POOL._holds(address, nbytes), f"{nbytes} bytes at {address:#x} are not an array's"
        strides = kind.itemsize, kind.itemsize * line
        return np.ndarray((rows, columns), kind, at(address, nbytes), 0, strides), _range(address, nbytes, written)

    (left, range_a), (right, range_b), (out, range_d) = matrix(a, adesc), matrix(b, bdesc), matrix(d, ddesc)
    left = left.T if description[MatmulDescAttribute.TRANSA] else left
    right = right.T if description[MatmulDescAttribute.TRANSB] else right
    scales = [at(description[scale], 4).view(np.float32) for scale in SCALES if scale in description]
    ranges = [range_a, range_b, (*range_d[:2], True), _range(workspace, 1000, True), *(_range(x.ctypes.data, 4, False) for x in scales)]
    epilogue, vector, aux = Epilogue(description.get(MatmulDescAttribute.EPILOGUE, 1)), np.empty(0), np.empty(0)
    assert epilogue == Epilogue.DEFAULT or not keep
    assert not any(description[name] % alignment for name, alignment in description["searched"].items())
    if epilogue in ADDS_BIAS or epilogue in SUMS:
        size = out.shape[1] if epilogue == Epilogue.BGRADB else out.shape[0]
        address = description[MatmulDescAttribute.BIAS_POINTER]
        vector, place = lying(address, out.dtype, size, 1, size, epilogue in SUMS)
        ranges.append(place)
    if epilogue in WITH_AUX:
        address, line = description[MatmulDescAttribute.EPILOGUE_AUX_POINTER], description[MatmulDescAttribute.EPILOGUE_AUX_LD]
        aux, place = lying(address, out.dtype, *out.shape, line, epilogue == Epilogue.GELU_AUX_BIAS)
        ranges.append(place)
    calls.append(("product of 8 bits" if scales else "product") + CALLED[epilogue])

    def run() -> None:
        if epilogue in SUMS:
            vector[:, 0] = left.astype(np.float32).sum(1) if epilogue == Epilogue.BGRADA else right.astype(np.float32).sum(0)
        product = left.astype(np.float32) @ right.astype(np.float32)
        for scale in scales:
            product *= scale[0]
        product += out.astype(np.float32) if keep else 0
        if epilogue in ADDS_BIAS:
            product += vector.astype(np.float32)
        if epilogue == Epilogue.GELU_AUX_BIAS:
            aux[...] = product
        if epilogue in (Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS):
            product = EXACT.gelu(product, True)
        if epilogue == Epilogue.DGELU:
            product = EXACT.gelu_backward(np.ascontiguousarray(product), np.ascontiguousarray(aux.astype(np.float32)), True)
        out[...] = product

    _stream(stream)._issue("cublasLt matmul", ranges, run)


MODULES: dict[str, dict[str, Any]] = {
    "cudnn": {"cudnnGraphNotSupportedError": cudnnGraphNotSupportedError, "data_type": data_type, "heur_mode": heur_mode,
              "create_handle": create_handle, "set_stream": set_stream, "backend_version_string": backend_version_string,
              "tensor": tensor, "pygraph": pygraph},
    "nvmath": {}, "nvmath.bindings": {},
    "nvmath.bindings.cublasLt": {x.__name__: x for x in (
        cuBLASLtError, MatmulDescAttribute, MatmulPreferenceAttribute, Epilogue, MatmulHeuristicResult, create, get_version,
        matmul_desc_create, matmul_desc_set_attribute, matrix_layout_create, matmul_preference_create, matmul_preference_set_attribute,
        matmul_preference_destroy, matmul_algo_get_heuristic, matmul)},
}


@contextmanager
def installed() -> Iterator[None]:
    """While this is open, inside `lazy_cupy.installed()`, the libraries are found."""
    users = "mpshard.device.cupy_cudnn", "mpshard.device.cupy_cublaslt"
    calls.clear()
    with instead(MODULES, lambda name: name.split(".")[0] in ("cudnn", "nvmath") or name in users):
        yield
