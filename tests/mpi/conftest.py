"""Fixtures of the tests that run inside ranks (`rank_*.py`); the parent that launches them uses none of these."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """The world: 1, 2, 3 or 4 ranks, as the parent launched them. Importing MPI here initialises it."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def shared_tmp_path(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """One empty folder that all ranks see (rank 0's); `tmp_path` itself is each rank's own."""
    return comm.bcast(tmp_path)
