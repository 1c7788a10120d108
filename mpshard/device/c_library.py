"""The library of compiled kernels: finding it, and calling what is in it.

It is built with the package where there is a C compiler (`c_kernels/compiled.c`), with the kernels for several sets of
instructions, of which the processor's best is taken.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 4  # compiled.c's
ORDER = ("plain", "avx2", "avx512", "zen4")


@cache
def load() -> ctypes.CDLL | str:
    """The library; or why there is none, in one line."""
    built = [path for suffix in EXTENSION_SUFFIXES for path in Path(__file__).parent.glob(f"_compiled{suffix}")]
    if not built:
        return "they were not built; is there a C compiler? Install mpshard again once there is"
    try:
        library = ctypes.CDLL(str(built[0]))
        if library.version() == VERSION:
            return library
    except (OSError, AttributeError) as error:
        return f"they cannot be loaded: {error}"
    return f"{built[0].name} was built from other sources: install mpshard again"


@cache
def all_instructions() -> tuple[str, ...]:
    """The sets of instructions that there are kernels for here, each the one before and more; none without the library.

    "zen4" is avx512's, and products.
    """
    library = load()
    if isinstance(library, str):
        return ()
    library.instructions.restype = ctypes.c_char_p
    best = library.instructions().decode()
    return ORDER[: ORDER.index("zen4" if best == "avx512" and library.multiplies() else best) + 1]


def multiplies_bf16() -> bool:
    """Whether there are products of bfloat16 here."""
    library = load()
    return not isinstance(library, str) and bool(library.multiplies_bf16())


# Parameters of each kernel: l long, f float, i int, u unsigned, p pointer to an array's first element; a is an int that says
# whether a gradient is added to or overwritten.
SIGNATURES = {
    "gelu": "lpp", "gelu_backward": "lppp", "swiglu": "llpp", "swiglu_backward": "llppp",
    "layer_norm": "llpppfppp", "layer_norm_backward": "llppppp" "apppip", "rms_norm": "llppfpp", "rms_norm_backward": "llpppp" "appip",
    "add": "lpp", "sum_of_two": "lppp", "column_sum": "llpapp", "sum_of_squares": "lp", "exponentials": "llppp", "adamw": "lpppp" "fffffff",
    "to_bf16": "lpp", "from_bf16": "lpp", "dropout": "lpuuuufp",
    "rotary": "llllpppf", "attention_scratch": "ll", "attention_backward_scratch": "ll", "attention": "llllllf" "ppppp",
    "attention_backward": "llllllf" "ppppppp", "product_scratch": "l", "product": "lll" "pll" "pll" "pplap",
    "blas_product": "lll" "pll" "pll" "ppla" "pi",
}
_TYPES = {"l": ctypes.c_long, "f": ctypes.c_float, "i": ctypes.c_int, "a": ctypes.c_int, "u": ctypes.c_uint, "p": ctypes.c_void_p}
_RESULTS = {"exponentials": ctypes.c_double, "sum_of_squares": ctypes.c_double,
            **dict.fromkeys(("attention_scratch", "attention_backward_scratch", "product_scratch"), ctypes.c_long)}


@cache
def kernel(name: str, chosen: str) -> Any:
    """A kernel, for a set of instructions, or "bf16" for a product."""
    library = load()
    assert not isinstance(library, str)
    found = getattr(library, f"{name}_{chosen}")
    found.argtypes, found.restype = [_TYPES[letter] for letter in SIGNATURES[name]], _RESULTS.get(name)
    return found


_HEADER = object.__basicsize__  # bytes
_pointer_at = ctypes.c_void_p.from_address


def at(array: np.ndarray | None) -> int | None:
    """Where an array's first element is.

    NumPy's interface for C promises that an array's pointer comes first behind what all objects have; read there it takes
    0.2 us, asked for by `__array_interface__` 1.2, and a step of small layers asks some thousand times.
    """
    return None if array is None else _pointer_at(id(array) + _HEADER).value


_probe = np.zeros(2, np.float32)[1:]
if at(_probe) != _probe.__array_interface__["data"][0]:  # some other Python's objects
    def at(array: np.ndarray | None) -> int | None:
        return None if array is None else array.__array_interface__["data"][0]
