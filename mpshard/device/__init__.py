"""The device room: memory and kernels behind one protocol (`base.Device`). The only room that imports CuPy."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from mpshard.config import ConfigError
from mpshard.device.base import Array, Device, Kind, Memory
from mpshard.device.c_library import all_instructions
from mpshard.device.compiled import CompiledDevice
from mpshard.device.numpy_device import NumpyDevice

__all__ = ["Array", "Device", "Kind", "Memory", "cpu_kernels", "gpu_libraries", "open_device", "why_no_cupy"]


def open_device(name: str = "auto", poison: bool = False, node_rank: int = 0, node_ranks: int = 1, tf32: bool = False,
                kernels: str = "") -> Device:
    """The device called "numpy" or "cupy"; "auto" is CuPy where it is installed and finds a GPU, else NumPy.

    node_rank, node_ranks: this rank's number among those of its node, and how many they are: each takes one of the node's
    GPUs, in turn. tf32: let tensor cores round the inputs of float32 products on a GPU. kernels: of a CPU, one of
    `cpu_kernels`; default the last. A GPU's are the project's own until `gpu_libraries` are given to it.

    Raises ConfigError for another name and where CuPy is asked for and cannot be had.
    """
    if name not in ("numpy", "cupy", "auto"):
        raise ConfigError(f'device must be "numpy", "cupy" or "auto", not "{name}"')
    reason = None if name == "numpy" else why_no_cupy()
    if name == "cupy" and reason is not None:
        raise ConfigError(f"run.device=cupy cannot be used: {reason}; use run.device=numpy")
    if name == "numpy" or reason is not None:
        kernels = kernels or cpu_kernels()[-1]
        return NumpyDevice(poison) if kernels == "numpy" else CompiledDevice(poison, kernels)
    from mpshard.device.cupy_device import CupyDevice

    return CupyDevice(poison, node_rank, node_ranks, tf32)


def gpu_libraries(device: Device, common: Callable[[list[bool]], list[bool]], fp8: bool = True) -> list[str]:
    """Let a GPU use those of NVIDIA's libraries that are installed and right here. Returns why others are not used, a line each.

    common: from which are here on this rank to which are on all. fp8: whether products of 8 bits are among those wanted.
    """
    from mpshard.device.cupy_libraries import find, use

    found = find(device, fp8)
    agreed = common([each.library is not None for each in found])
    use(device, [each for each, everywhere in zip(found, agreed, strict=True) if everywhere])
    return list(dict.fromkeys(each.reason for each in found if each.reason))


def cpu_kernels() -> tuple[str, ...]:
    """Whose kernels a CPU can run here, the best last: NumPy's, and compiled ones for each set of instructions."""
    return ("numpy", *all_instructions())


def why_no_cupy() -> str | None:
    """One line for the user, or None if a CuPy device can be opened."""
    if find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'mpshard[cuda12]' or 'mpshard[cuda13]')"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no usable GPU ({error})"
    return None if count else "CuPy finds no GPU"
