"""What all tests share. Nothing here may import MPI: see `tests/launch.py`."""

from __future__ import annotations

import os
import signal

import pytest

from tests.launch import TOKEN

if TOKEN not in os.environ:  # in ranks nobody uses it, and it takes a while to import
    from hypothesis import settings

    # Hypothesis's deadline is an assertion on the clock: it fails on a busy machine.
    settings.register_profile("mpshard", deadline=None)
    settings.load_profile("mpshard")

# A shell's background job is started with interrupts ignored, and so would be all that it starts: the tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ON_REQUEST = ("slow", "exhaustive", "cluster")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow, exhaustive or cluster run only when `-m` names the mark."""
    asked = config.getoption("-m")
    for mark in _ON_REQUEST:
        if mark not in asked:
            skip = pytest.mark.skip(reason=f"{mark}: run with -m {mark}")
            for item in items:
                if item.get_closest_marker(mark):  # not item.keywords: those hold the names of folders, too
                    item.add_marker(skip)
