"""Tests of the tests: a rank that fails in whatever way is noticed, explained and cleaned up after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, TIMED_OUT, Result, clean_env, is_open_mpi, launch
from tests.mpi.test_ranks import pytest_args

pytestmark = pytest.mark.mpi
FAULTY = Path(__file__).with_name("faulty_ranks.py")
LIMIT = 60


def run_faulty(test: str, timeout: float = LIMIT) -> Result:
    result = launch(2, pytest_args(f"{FAULTY}::{test}"), timeout)
    assert not [path for path in result.leaked if os.path.exists(path)]
    return result


@pytest.mark.parametrize("test", ["test_raise", "test_leave", "test_killed"])
def test_a_failing_rank_ends_the_job(test: str) -> None:
    result = run_faulty(test)
    assert result.returncode not in (0, TIMED_OUT), result.report()
    assert result.orphans == 0
    if test == "test_raise":
        assert "rank 1 found something wrong" in result.logs[1], result.report()


def test_a_stalled_job_ends_at_its_limit_and_says_where_every_rank_was() -> None:
    for limit in (8, LIMIT):  # a busy machine may need more than the first to reach the stall
        result = run_faulty("test_stall", timeout=limit)
        assert result.timed_out
        if "in test_stall" in result.logs[0] and "in test_stall" in result.logs[1]:
            break
    assert "a_rank_stalls_here" in result.logs[1], result.report()
    assert "in test_stall" in result.logs[0], result.report()


def test_a_process_left_behind_is_ended_and_counted() -> None:
    result = run_faulty("test_orphan")
    assert (result.returncode, result.orphans) == (0, 2), result.report()


def test_output_is_kept_by_rank_and_stream() -> None:
    code = "import sys; from mpi4py import MPI; r = MPI.COMM_WORLD.rank; print('out', r); sys.stderr.write(f'err {r}')"
    result = launch(3, ["-c", code], LIMIT)
    assert result.returncode == 0
    assert result.stdout == "out 0\nout 1\nout 2\n"
    assert [log.splitlines()[0] for log in result.logs] == ["out 0", "out 1", "out 2"]
    assert "err 2" in result.logs[2]


def test_a_launch_inside_a_rank_is_its_own_world() -> None:
    inner = "from mpi4py import MPI; print('inner', MPI.COMM_WORLD.size)"
    outer = (
        "from mpi4py import MPI; from tests.launch import launch;"
        f"MPI.COMM_WORLD.rank == 0 and print(launch(1, ['-c', {inner!r}]).stdout)"
    )
    result = launch(2, ["-c", outer], LIMIT)
    assert "inner 1" in result.stdout, result.report()


def test_launching_imports_no_mpi() -> None:
    """In a fresh process: other tests of this run may have imported it for reasons of their own."""
    code = "import sys, tests.launch, tests.mpi.test_ranks; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_environment_is_the_launchers_own() -> None:
    assert not [name for name in clean_env() if name.startswith(("PMI_", "OMPI_"))]
    assert is_open_mpi() in (True, False)
