"""Fixtures of the tests that run inside ranks (`rank_*.py`); the parent that launches them uses none of these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import where

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


if where.STAND_IN:

    @pytest.fixture(autouse=True)
    def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Each test has a stand-in of its own, on whose one device `where.here` puts its models."""
        from mpshard.comm import staged
        from mpshard.device import open_device
        from tests.device import lazy_cupy

        monkeypatch.setattr(staged, "CHUNK", 1 << 14)  # a few chunks a unit
        with lazy_cupy.installed():
            where.opened[:] = [open_device("cupy", poison=True)]
            yield
            where.opened.clear()

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(where.SILENT)
