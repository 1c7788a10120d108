"""Runs each `rank_*.py` of this folder at 1, 2, 3 and 4 ranks.

Every rank runs pytest over the file, so a test is ordinary code with a `comm` fixture, called on all ranks
together. `-m mpi4py` turns the failure of one rank into an abort of all; without it the others wait for ever.

A file may say at its top, as literals: `RANKS = (1, 2, 4)` (not at all four), `ON_STAND_IN = (2,)` (at how many its models
also train on the stand-in for CuPy; default none), `TIMEOUT = 120` (seconds a launch; default 90) and `MARKS = ("slow",)`
(marks of its launches; marks inside the file have no effect).

A launch of one rank leaves cores idle, as do the tests of a single process that come before these; so `tests/conftest.py` starts
those of one rank beside them, one after another.
"""

from __future__ import annotations

import ast
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.device import cuda_on_cpu
from tests.launch import DEVICE, Result, launch

HERE = Path(__file__).parent
ALL_RANKS = (1, 2, 3, 4)
started: dict[Path, Future[Result]] = {}  # launches of one rank


def settings(file: Path) -> dict[str, Any]:
    """Values of the file's upper-case literals; read, not imported: a rank file may import MPI."""
    values = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("RANKS", "ON_STAND_IN", "TIMEOUT", "MARKS"):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    return values


def launches() -> list[Any]:
    params = []
    for file in sorted(HERE.glob("rank_*.py")):
        chosen = settings(file)
        marks = [pytest.mark.mpi, *(getattr(pytest.mark, mark) for mark in chosen.get("MARKS", ()))]
        for n in chosen.get("RANKS", ALL_RANKS):
            params.append(pytest.param(file, n, "numpy", chosen.get("TIMEOUT", 90), marks=marks, id=f"{file.stem}-{n}"))
        missing = cuda_on_cpu.missing()
        marks.append(pytest.mark.skipif(missing is not None, reason=str(missing)))
        for n in chosen.get("ON_STAND_IN", ()):
            params.append(pytest.param(file, n, "cupy", chosen.get("TIMEOUT", 90), marks=marks, id=f"{file.stem}-{n}-stand-in"))
    return params


@pytest.mark.parametrize(("file", "n", "device", "timeout"), launches())
def test_ranks(file: Path, n: int, device: str, timeout: float) -> None:
    if (n, device) == (1, "numpy") and file in started:
        result = started.pop(file).result()
    else:
        result = launch(n, pytest_args(str(file)), timeout, {DEVICE: device})
    if result.returncode:
        pytest.fail(result.report(), pytrace=False)


def pytest_args(target: str) -> list[str]:
    """Arguments of python for one rank's pytest: stop at the first failure, and write no cache into the tree."""
    return ["-m", "mpi4py", "-m", "pytest", "-x", "-v", "--tb=short", "-p", "no:cacheprovider", target]
