"""The text of the CUDA kernels: found, put together and described. Knows nothing of CuPy, so tests read it anywhere.

Headers are put in place of their `#include`: CuPy keeps compiled kernels by the text it was given, and would not see
that a header had changed.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("cupy_kernels")

# NumPy's names of types -> the kernels'.
C_TYPES = {"float32": "float", "float64": "double", "float16": "f16", "bfloat16": "bf16"}

# And cudaDataType's (library_types.h), for cuBLAS.
CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14, "float8_e4m3fn": 28, "float8_e5m2": 29}

# NVRTC takes what is not annotated, as a lambda, for the host's, unless told that there is none; nvcc knows by itself.
NVRTC_OPTIONS = ("-default-device",)

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_KERNEL = re.compile(r"^KERNEL (\w+)\(([^)]*)\)", re.MULTILINE)


@cache
def source(file: str) -> str:
    """The whole text of a kernel file, headers included."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda include: source(include[1]), text)


@cache
def kernels() -> dict[str, str]:
    """{kernel: its file}. A kernel's name is unique among all files."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.cu")):
        for name in kernels_in(path.read_text(encoding="utf-8")):
            if name in found:
                raise ValueError(f"{found[name]} and {path.name} both define the kernel {name}")
            found[name] = path.name
    return found


def kernels_in(text: str) -> list[str]:
    """The kernels that a source text defines."""
    return [name for name, _ in _KERNEL.findall(text)]


@cache
def parameters(kernel: str) -> tuple[tuple[str, str], ...]:
    """(C type, name) of each argument: ("const T*", "x"), ("long long", "size") ..."""
    for name, text in _KERNEL.findall(source(kernels()[kernel])):
        if name == kernel:
            pairs = (" ".join(part.split()).rpartition(" ") for part in text.split(","))
            return tuple((kind, parameter) for kind, _, parameter in pairs)
    raise KeyError(kernel)


def options(types: tuple[str, ...], **constants: int) -> tuple[str, ...]:
    """Compiler options that choose T, U, V (NumPy's names) and constants such as TILE."""
    chosen = [f"-D{letter}_IS={C_TYPES[name]}" for letter, name in zip("TUV", types, strict=False)]
    return (*chosen, *(f"-D{name}={value}" for name, value in sorted(constants.items())), "-std=c++17")
