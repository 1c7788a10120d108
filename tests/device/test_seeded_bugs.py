"""The stand-in for CuPy bites: mistakes put in on purpose, one at a time, fail a training run of 2 steps on 2 ranks."""

from __future__ import annotations

import pytest

from tests.device import cuda_on_cpu
from tests.device.seeded_bugs import BUGS
from tests.launch import launch

ALIKE = ("none-mpi", "slot_gathered_into_while_it_is_read-mpi", "slice_sent_before_it_is_updated-staged",
         "event_recorded_on_the_wrong_stream-staged")  # to others: on request


@pytest.mark.mpi
@pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=pytest.mark.slow) if bug in ALIKE else bug for bug in BUGS])
def test_a_bug_is_caught(bug):
    result = launch(2, ["-m", "mpi4py", "-m", "tests.device.seeded_bugs", bug], timeout=90)
    assert not result.timed_out, result.report()
    if bug.startswith("none"):
        assert result.returncode == 0, result.report()
    else:
        assert result.returncode != 0 and "Error" in result.stderr, result.report()
