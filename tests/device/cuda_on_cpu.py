"""Runs the CUDA kernels' own source on the CPU, compiled by g++ behind `cuda_on_cpu.hpp`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from mpshard.device import cupy_source
from tests.launch import CACHE

SHIM = Path(__file__).with_name("cuda_on_cpu.hpp")


def missing() -> str | None:
    """Why kernels cannot be run here, or None."""
    return None if shutil.which("g++") else "there is no g++ to compile the kernels for the CPU"


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


def run(kernel: str, text: str, options: tuple[str, ...], grid: tuple[int, ...], threads: int, shared: int,
        args: list[Any]) -> None:
    """Run a grid to its end. text: the kernel's source. shared: bytes asked for. args: ctypes values, pointers as c_void_p."""
    library = _compiled(text, options)
    pointers = (ctypes.c_void_p * len(args))(*(ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in args))
    library[f"run_{kernel}"](Dim3(*grid, *(1,) * (3 - len(grid))), ctypes.c_uint(threads), ctypes.c_size_t(shared), pointers)


@cache
def _compiled(text: str, options: tuple[str, ...]) -> ctypes.CDLL:
    _scheduler()
    entries = "\n".join(_entry(name) for name in cupy_source.kernels_in(text))
    return ctypes.CDLL(_build(f'#include "{SHIM}"\n{text}\n{entries}', options))


@cache
def _scheduler() -> ctypes.CDLL:
    text = SHIM.with_suffix(".cpp").read_text().replace(SHIM.name, str(SHIM))
    return ctypes.CDLL(_build(text, ("-std=c++17",)), mode=ctypes.RTLD_GLOBAL)


def _build(text: str, options: tuple[str, ...]) -> str:
    """The path of a shared library, made once and kept in the system's temporary folder, also by what is launched."""
    folder = Path(os.environ.get(CACHE, tempfile.gettempdir())) / f"mpshard-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    key = hashlib.sha256("\0".join([SHIM.read_text(), text, *options]).encode()).hexdigest()[:24]
    library = folder / f"{key}.so"
    if not library.exists():  # several ranks may get here at once: each makes its own, the last one stays
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, made = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            source.write_text(text)
            command = ["g++", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w",
                       *options, "-o", str(made), str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:4000]}")
            made.rename(library)
    return str(library)


def _entry(kernel: str) -> str:
    """C++ that runs a kernel over a grid, with arguments behind an array of pointers."""
    values = ", ".join(f"*({kind}*)args[{i}]" for i, (kind, _) in enumerate(cupy_source.parameters(kernel)))
    return (f'extern "C" void run_{kernel}(Dim3 grid, unsigned threads, size_t shared, void** args) '
            f"{{ shim::run(grid, threads, shared, [](void** args) {{ {kernel}({values}); }}, args); }}")
