"""What all tests share. Nothing here may import MPI: see `tests/launch.py`."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.launch import DEVICE, TOKEN, end_all, launch

if TOKEN not in os.environ:  # in ranks nobody uses it, and it takes a while to import
    from hypothesis import settings

    # Hypothesis's deadline is an assertion on the clock: it fails on a busy machine.
    settings.register_profile("mpshard", deadline=None)
    settings.load_profile("mpshard")

# A shell's background job is started with interrupts ignored, and so would be all that it starts: the tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ON_REQUEST = ("slow", "exhaustive", "cluster")
_beside = ThreadPoolExecutor(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow, exhaustive or cluster run only when `-m` names the mark."""
    asked = config.getoption("-m")
    for mark in _ON_REQUEST:
        if mark not in asked:
            skip = pytest.mark.skip(reason=f"{mark}: run with -m {mark}")
            for item in items:
                if item.get_closest_marker(mark):  # not item.keywords: those hold the names of folders, too
                    item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what `tests/mpi/test_ranks.py` launches on one rank, if other tests come before and there is a core for it."""
    option = session.config.option
    if option.collectonly or option.setupplan or option.setuponly or os.cpu_count() == 1:
        return
    alone = [item for item in session.items if getattr(item, "originalname", "") == "test_ranks" and item.callspec.params["n"] == 1
             and item.callspec.params["device"] == "numpy" and not item.get_closest_marker("skip")]
    if alone and session.items[0] is not alone[0]:
        for item in alone:
            file, timeout, module = item.callspec.params["file"], item.callspec.params["timeout"], item.module
            module.started[file] = _beside.submit(launch, 1, module.pytest_args(str(file)), 2 * timeout, {DEVICE: "numpy"})


def pytest_sessionfinish() -> None:
    _beside.shutdown(wait=False, cancel_futures=True)
    end_all()  # a session that was stopped leaves one under way
