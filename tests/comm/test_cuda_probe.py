"""The probe for CUDA-awareness: whatever happens to the two ranks it starts is an answer, not a crash here."""

from __future__ import annotations

import sys

import pytest

from mpshard.comm.cuda_probe import PASSED, probe
from tests.launch import launch


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(("code", "aware", "why"), [
    (f"print('{PASSED}'); print('{PASSED}')", True, "exchanged device memory"),
    (f"print('{PASSED}')", False, "status 0"),  # one rank alone: a launcher that makes worlds of size 1
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, "status -11"),
    ("raise AssertionError('wrong bytes')", False, "wrong bytes"),
    ("import time; time.sleep(60)", False, "hung for 1 s"),
])
def test_every_outcome_is_a_verdict(code, aware, why):
    verdict = probe(python(code), seconds=1.0 if "sleep" in code else 30.0)
    assert verdict.aware is aware and why in verdict.why


def test_no_such_launcher():
    assert "cannot be started" in probe(["/no/such/mpiexec"]).why


def test_children_do_not_see_the_launcher(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    code = f"import os; assert not any(n.startswith(('PMI_', 'OMPI_')) for n in os.environ); print('{PASSED}'); print('{PASSED}')"
    assert probe(python(code)).aware


@pytest.mark.mpi
def test_the_exchange_itself():
    """What the two ranks do, in host memory: the same collectives, the same comparison."""
    result = launch(2, ["-m", "mpshard.comm.cuda_probe", "numpy"], 60)
    assert result.returncode == 0 and result.stdout.count(PASSED) == 2, result.report()


def test_doctor_judges_it():
    from mpshard.comm.cuda_probe import Verdict
    from mpshard.doctor import judge_cuda_aware

    assert "is mpi" in judge_cuda_aware(Verdict(True, "it works")).found
    refused = judge_cuda_aware(Verdict(False, "status -11"))
    assert "status -11" in refused.found and refused.verdict.value == "slow" and refused.remedy
