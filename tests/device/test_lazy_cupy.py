"""The stand-in for CuPy has nothing that CuPy lacks, and is as late and as strict as it says."""

from __future__ import annotations

import inspect
import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from tests.device import lazy_cupy
from tests.device.make_cupy_names import arguments

NAMES = json.loads(Path(__file__).with_name("cupy_names.json").read_text())
OPEN_ENDED = {"ndarray", "RawKernel"}  # their constructors take *args


@pytest.mark.parametrize("module", lazy_cupy.MODULES)
def test_every_name_and_argument_is_real(module):
    for name, ours in lazy_cupy.MODULES[module].items():
        real = NAMES[module][name]
        if callable(ours) and real["arguments"] is not None and name not in OPEN_ENDED:
            assert set(arguments(ours)) <= set(real["arguments"]), f"{module}.{name}"
        if inspect.isclass(ours):
            for member in [member for member in vars(ours) if not member.startswith("_")]:
                assert member in real["members"], f"{module}.{name}.{member}"
                if real["members"][member] is not None and inspect.isfunction(vars(ours)[member]):
                    assert set(arguments(vars(ours)[member])) <= set(real["members"][member]) | {"shape"}, f"{name}.{member}"


def test_the_names_are_of_the_installed_version():
    distributions = [d for d in ("cupy", "cupy-cuda12x", "cupy-cuda13x") if find_distribution(d)]
    if not distributions:
        pytest.skip("CuPy is not installed: the names stay as they were read")
    assert metadata.version(distributions[0]).split(".")[0] == NAMES["version"].split(".")[0]


def find_distribution(name):
    """Whether the package is installed; asked of its metadata, since what is imported as cupy here is a stand-in."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@pytest.fixture
def device():
    if reason := lazy_cupy.cuda_on_cpu.missing():
        pytest.skip(reason)
    with lazy_cupy.installed():
        from mpshard.device import open_device

        yield open_device("cupy", poison=True)


def test_work_is_late_and_ordered(device):
    a, b = device.zeros(8, np.float32), device.zeros(8, np.float32)
    device.synchronise()
    a.fill(1)
    event = device.record()
    b.fill(2)
    assert a._host()[0] == b._host()[0] == 0
    assert not event.done and event.done  # a GPU goes on by itself
    assert a._host()[0] == 1 and b._host()[0] == 0
    assert device.to_host(b)[0] == 2


def test_memory_is_poisoned_when_it_is_used_again(device):
    first = device.zeros(1000, np.float32)
    device.synchronise()
    where = first.data.ptr
    del first
    second = device.empty(1000, np.float32)
    assert second.data.ptr == where and np.isnan(device.to_host(second)).all()


def test_streams_without_an_event_between_them(device):
    array, host = device.zeros(8, np.float32), device.pinned(32)
    device.download(array, host, after=[device.record()]).synchronize()
    assert not host.any()
    array.fill(1)
    late = device.download(array, host)
    with pytest.raises(RuntimeError, match="an event is missing"):
        late.synchronize()


def test_memory_given_away_too_early(device):
    array = device.zeros(8, np.float32)
    with pytest.raises(RuntimeError, match="still to come"):
        _ = array.__cuda_array_interface__
    device.synchronise()
    assert array.__cuda_array_interface__["data"] == (array.data.ptr, False)


def test_host_and_device_do_not_mix(device):
    array, host = device.zeros(8, np.float32), np.ones(8, np.float32)
    for wrong in (lambda: np.asarray(array), lambda: host + array, lambda: array + host, lambda: float(array[0]), lambda: bool(array[0]),
                  lambda: array.__setitem__(slice(None), host), lambda: array[np.arange(3)], lambda: np.copyto(host, array),
                  lambda: device.add(array, host), lambda: device.add(host, array), lambda: array.astype(np.float64)):
        with pytest.raises((TypeError, AttributeError)):
            wrong()


def test_arguments_of_kernels_are_checked(device):
    x = device.zeros(8, np.float32)
    for args in ((x, x), (x, x, 8, 8), (x, x, np.int64(8)), (x, x, 8.0), (x, 5, 8), (x, x[::2], 8)):
        with pytest.raises(TypeError):
            device.launch("add", (1,), 32, args, np.float32, np.float32)
    with pytest.raises(TypeError, match="CuPy array of float16"):
        device.launch("add", (1,), 32, (x, x, 8), np.float16, np.float32)
