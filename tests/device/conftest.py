import numpy as np
import pytest

from mpshard.device.numpy_device import NumpyDevice


@pytest.fixture
def device():
    return NumpyDevice(poison=True)


@pytest.fixture
def random():
    return np.random.default_rng(0)
