"""Element types of safetensors files, and values to their bytes and back. No MPI.

bfloat16 is the upper half of float32 (1 sign, 8 exponent, 7 fraction bits), so it is converted by integer
arithmetic: NumPy has no such type, and a checkpoint should not need one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
         "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # bytes an element
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2",
          "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8"}
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int8": "I8",
          "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64"}
BLOCK = 1 << 15  # elements converted at a time
FLOATS = ("F64", "F32", "F16", "BF16")  # what weights may be stored as


def code_of(dtype: Any) -> str:
    """The file's name of an array's type. Raises ValueError for one that has none."""
    name = np.dtype(dtype).name
    if name not in _CODES:
        raise ValueError(f"arrays of type {name} cannot be stored in a safetensors file")
    return _CODES[name]


def encode(values: np.ndarray, code: str, out: np.ndarray) -> None:
    """Put values (n,) as type `code` into the bytes out (n * size,) uint8; rounds to nearest, ties to even."""
    if code != "BF16":
        out.view(_NUMPY[code])[:] = values
        return
    words = out.view("<u2")
    if values.dtype.name == "bfloat16":
        words[:] = values.view(np.uint16)
        return
    for start in range(0, len(values), BLOCK):  # in blocks, so that the temporaries stay small
        bits = values[start:start + BLOCK].astype(np.float32).view(np.uint32)
        rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
        not_a_number = (bits & 0x7FFFFFFF) > 0x7F800000
        words[start:start + BLOCK] = np.where(not_a_number, bits | 0x400000, rounded) >> 16


def decode(raw: np.ndarray, code: str) -> np.ndarray:
    """Values (n,) from the bytes raw (n * size,) uint8; bfloat16 as float32. May be a view of `raw`."""
    if code == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view(_NUMPY[code])


def is_exact(dtype: Any, code: str) -> bool:
    """Whether arrays of `dtype` survive being stored as `code` bit for bit."""
    name = np.dtype(dtype).name
    within = {"bfloat16": ("BF16", "F32", "F64"), "float16": ("F16", "F32", "F64"), "float32": ("F32", "F64")}
    return code in within.get(name, (_CODES.get(name),))
