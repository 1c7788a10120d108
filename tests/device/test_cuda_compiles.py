"""Every kernel's source compiles for the GPUs the project names, without a warning; in all precisions with -m slow."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from mpshard.device import cupy_source

ARCHITECTURES = ("80", "90")  # A100, H100


@pytest.mark.parametrize("name", [
    "bfloat16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "float16", "float64"))])  # 15 s each
def test_kernels_compile(name, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    narrow = name in ("float16", "bfloat16")
    options = cupy_source.options((name, "float32" if narrow else name), TILE=64 if narrow else 32, HEAD=128)
    files = sorted(path.name for path in cupy_source.FOLDER.glob("*.cu"))
    together = tmp_path / "all.cu"
    together.write_text("".join(f'#include "{file}"\n' for file in files))
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    done = subprocess.run(
        ["nvcc", *targets, *options, "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror", "-I", cupy_source.FOLDER,
         "-fatbin", "-o", tmp_path / "all.fatbin", together, "-Xptxas", "-v"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    if name != "float64":  # which is for tests: the others must keep their tiles in registers
        spilled = [line for line in done.stderr.splitlines() if "spill" in line and " 0 bytes spill stores" not in line]
        assert not spilled
    compiled = [line for line in done.stderr.splitlines() if "Compiling entry function" in line]
    assert len(compiled) == len(cupy_source.kernels()) * len(ARCHITECTURES)


def test_headers_are_put_in_place():
    for file in set(cupy_source.kernels().values()):
        assert "#include" not in cupy_source.source(file)


def nvrtc():
    """The compiler that CuPy uses, from the toolkit or from the package nvidia-cuda-nvrtc; None where there is none."""
    folders = (find_spec("nvidia.cuda_nvrtc") if find_spec("nvidia") else None) or None
    found = [str(p) for folder in (folders.submodule_search_locations if folders else ()) for p in Path(folder).glob("lib/libnvrtc.so*")]
    name = next(iter(found), None) or ctypes.util.find_library("nvrtc")
    return ctypes.CDLL(name) if name else None


@pytest.mark.parametrize("name", cupy_source.C_TYPES)
def test_kernels_compile_at_run_time(name):
    """As CuPy does it: one file at a time, no header of the toolkit at hand."""
    if (library := nvrtc()) is None:
        pytest.skip("there is no NVRTC")
    for file in sorted(set(cupy_source.kernels().values())):
        options = (*cupy_source.options((name, "float32"), TILE=32, HEAD=64), *cupy_source.NVRTC_OPTIONS, "--gpu-architecture=sm_80")
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        text = cupy_source.source(file).encode()
        assert library.nvrtcCreateProgram(ctypes.byref(program), text, file.encode(), 0, None, None) == 0
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        assert status == 0 and not log.value, log.value.decode()
        library.nvrtcDestroyProgram(ctypes.byref(program))
