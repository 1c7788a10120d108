"""The stand-in for CuPy bites: mistakes put in on purpose, one at a time, fail a training run of 3 steps on 2 ranks."""

from __future__ import annotations

import pytest

from tests.device import cuda_on_cpu
from tests.device.seeded_bugs import BUGS
from tests.launch import launch


@pytest.mark.mpi
@pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug):
    result = launch(2, ["-m", "mpi4py", "-m", "tests.device.seeded_bugs", bug], timeout=90)
    assert not result.timed_out, result.report()
    if bug.startswith("none"):
        assert result.returncode == 0, result.report()
    else:
        assert result.returncode != 0 and "Error" in result.stderr, result.report()
