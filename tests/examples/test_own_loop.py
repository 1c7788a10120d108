"""The example of a loop of one's own learns, and says the same on one rank and on two."""

from __future__ import annotations

import re

import pytest

from tests.launch import ROOT, launch

pytestmark = pytest.mark.mpi


def losses(n: int) -> list[float]:
    result = launch(n, ["-m", "mpi4py", ROOT / "examples" / "own_loop.py"], 120)
    assert result.returncode == 0, result.report()
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+)", result.stdout, re.MULTILINE)]


def test_own_loop():
    alone, together = losses(1), losses(2)
    assert len(alone) == len(together) == 30
    assert together == pytest.approx(alone, abs=2e-3)  # printed with four digits, and fp32 sums in another order
    assert alone[0] > 5.3 and alone[-1] < 3.5  # from about ln 256
