"""Where the tests inside ranks train: on NumPy's device or, in a launch that asks for it, on the stand-in for CuPy."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mpshard.device import Device, open_device
from tests.launch import DEVICE

STAND_IN = os.environ.get(DEVICE) == "cupy"
opened: list[Device] = []  # the stand-in's device of the test that is running: a process has one
# Products that overflow warn on the stand-in, which multiplies with NumPy; a GPU says nothing.
SILENT = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


def here() -> dict[str, Any]:
    """What to tell `shard`: on which device, its memory poisoned whenever it is free. A new device each time but on the stand-in."""
    return {"device": opened[0], "cuda_aware": "yes"} if STAND_IN else {"device": open_device("numpy", poison=True)}


def on_numpy() -> dict[str, Any]:
    """The same on the CPU wherever the test runs, for what others are held against."""
    return {"device": open_device("numpy", poison=True)}


def of_numpy(reason: str) -> pytest.MarkDecorator:
    """The mark of a test of the CPU's alone."""
    return pytest.mark.skipif(STAND_IN, reason=f"of NumPy's device: {reason}")
