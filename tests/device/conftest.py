import numpy as np
import pytest

from mpshard.device import blas, c_library, compiled
from mpshard.device.numpy_device import NumpyDevice


@pytest.fixture(params=["numpy", "plain", "avx2", "avx512", "3 threads"])
def device(request, monkeypatch):
    """The NumPy device: NumPy's kernels, and the compiled ones of every set of instructions that this processor has; the best
    also cut among threads, however little there is to do."""
    if request.param == "numpy":
        return NumpyDevice(poison=True)
    if isinstance(reason := c_library.load(), str):
        pytest.skip(f"no compiled kernels: {reason}")
    if request.param == "3 threads":
        monkeypatch.setattr(compiled, "GRAIN", 1)
        monkeypatch.setattr(blas, "threads", lambda: 3)
        return compiled.CompiledDevice(poison=True)
    if request.param not in c_library.all_instructions():
        pytest.skip(f"this processor has no {request.param}")
    return compiled.CompiledDevice(poison=True, chosen=request.param)


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def gpu(request):
    """A CuPy device: with `-m gpu` on a GPU, else on the stand-in, whose kernels g++ compiles for the CPU."""
    from mpshard.config import ConfigError
    from mpshard.device import open_device
    from tests.device import cuda_on_cpu, lazy_cupy

    if "gpu" in request.config.getoption("-m"):
        try:
            yield open_device("cupy", poison=True)
        except ConfigError as error:
            pytest.skip(str(error))
        return
    if reason := cuda_on_cpu.missing():
        pytest.skip(reason)
    with lazy_cupy.installed():
        yield open_device("cupy", poison=True)
