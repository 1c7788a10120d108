"""Judgements on made-up facts; and the command on real ranks, among them a launch by the wrong launcher."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mpshard.comm.facts import MpiFacts, RankFacts
from mpshard.device.blas import BlasInfo
from mpshard.doctor import (
    Verdict,
    judge_blas,
    judge_cores,
    judge_huge_pages,
    judge_links,
    judge_mpi,
    judge_progress,
    judge_rates,
    judge_shm,
    judge_transport,
    judge_versions,
    judge_world,
)
from tests.launch import launch

OPENBLAS = BlasInfo("openblas", "0.3.30", "SkylakeX", 2)
RANK = RankFacts(0, "a", 0, (0, 1), 1, "MPICH 5.0.2", {"python": "3.12"}, (8 << 30, 8 << 30), 0.0)
PAIR = [RANK, replace(RANK, rank=1)]


def test_worlds():
    assert judge_world(2, [None, None]).verdict is Verdict.OK
    said = "started as one of 2 ranks (PMI_SIZE=2) but this MPI sees a world of 1: the launcher belongs to another MPI; use another"
    wrong = judge_world(1, [said])
    assert (wrong.verdict, wrong.remedy) == (Verdict.WRONG, "the launcher belongs to another MPI; use another")


def test_mpi_libraries_and_versions():
    multiple = MpiFacts("MPICH 5.0.2", "5.0", "multiple")
    assert judge_mpi(multiple, PAIR).verdict is Verdict.OK
    assert judge_mpi(replace(multiple, threads="serialized"), PAIR).verdict is Verdict.SLOW
    assert judge_mpi(multiple, [RANK, replace(RANK, library="Open MPI v5")]).verdict is Verdict.WRONG
    assert judge_versions(PAIR).verdict is Verdict.OK
    assert "3.11 and 3.12" in judge_versions([RANK, replace(RANK, versions={"python": "3.11"})]).found


def test_cores():
    assert judge_cores(PAIR).verdict is Verdict.OK
    crowd = [replace(RANK, rank=rank) for rank in range(3)]
    assert (judge_cores(crowd).verdict, judge_cores(crowd).remedy) == (Verdict.SLOW, "start no more ranks than cores")
    uneven = judge_cores([RANK, replace(RANK, rank=1, node=1, cores=4)])
    assert uneven.verdict is Verdict.SLOW and "1 to 4" in uneven.found


def test_ranks_bound_to_one_core(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    bound = judge_cores([replace(rank, affinity=(3,)) for rank in PAIR])
    assert bound.verdict is Verdict.SLOW and "core 3" in bound.found and "--bind-to" in bound.remedy


@pytest.mark.parametrize(("blas", "threads", "environ", "flags", "remedy"), [
    (OPENBLAS, 2, {}, {"avx512f"}, ""),
    (OPENBLAS, 2, {"OMP_NUM_THREADS": "1"}, {"avx512f"}, ""),  # it follows what it is asked for all the same
    (OPENBLAS, 1, {"OMP_NUM_THREADS": "1"}, {"avx512f"}, "unset OMP_NUM_THREADS"),
    (OPENBLAS, 2, {"OPENBLAS_CORETYPE": "Haswell"}, {"avx512f"}, "unset OPENBLAS_CORETYPE"),
    (replace(OPENBLAS, architecture="Haswell"), 2, {}, {"avx512f"}, "upgrade numpy"),
    (replace(OPENBLAS, architecture="Haswell"), 2, {}, {"avx2"}, ""),
    (BlasInfo("unknown", "?", "?", 1), 1, {}, set(), "set its thread variable"),
])
def test_blas(blas, threads, environ, flags, remedy):
    check = judge_blas(blas, 2, threads, environ, frozenset(flags))
    assert check.verdict is (Verdict.SLOW if remedy else Verdict.OK) and remedy in check.remedy


def test_memory_progress_rates_links():
    assert judge_shm(PAIR).verdict is Verdict.OK
    assert "--shm-size" in judge_shm([RANK, replace(RANK, shm=(64 << 20, 60 << 20))]).remedy
    assert judge_shm([replace(RANK, shm=None)]).verdict is Verdict.SLOW
    for chosen, facts in (("thread", (2, 2, 2, "multiple")), ("poll", (1, 2, 2, "multiple")), ("timer", (1, 4, 2, "multiple")),
                          ("poll", (2, 2, 2, "serialized")), ("poll", (1, 1, 1, "multiple"))):
        check = judge_progress(*facts)
        assert f"auto = {chosen}" in check.found and check.verdict is Verdict.OK
    assert judge_progress(1, 2, 1, "serialized").verdict is Verdict.SLOW
    assert "auto = shm" in judge_transport(2, None).found
    assert judge_transport(2, "no two ranks share a node").verdict is Verdict.OK
    assert judge_transport(2, "/dev/shm has 1 MiB free, 64 MiB are needed").verdict is Verdict.SLOW
    assert judge_huge_pages("always madvise [never]").verdict is Verdict.SLOW
    assert judge_huge_pages("always [madvise] never").verdict is Verdict.OK
    (rate,) = judge_rates([100.0, 60.0, 101.0], [*PAIR, replace(RANK, rank=2)])
    assert rate.verdict is Verdict.SLOW and "rank 1 on a only 60" in rate.found
    assert judge_links(PAIR) == []
    (link,) = judge_links([replace(RANK, link=1e9), replace(RANK, host="b", link=1e8)])
    assert link.verdict is Verdict.SLOW and "b only 100" in link.found


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command(ranks):
    done = launch(ranks, ["-m", "mpshard", "doctor", "--json"])
    assert done.returncode == 0, done.report()
    found = json.loads(done.stdout)
    names = {check["name"] for check in found["checks"]}
    assert names >= {"world", "MPI", "cores", "BLAS", "transport", "shared memory", "progress", "GPU"}
    assert sorted(rank for node in found["nodes"] for rank in node["ranks"]) == list(range(ranks))
    assert all(check["remedy"] for check in found["checks"] if check["verdict"] != "ok")


@pytest.mark.mpi
def test_the_screen():
    done = launch(1, ["-m", "mpshard", "doctor"])
    assert done.returncode == 0 and "thread level" in done.stdout and "bound to" in done.stdout, done.report()
