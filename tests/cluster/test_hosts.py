"""On two virtual hosts: messages over TCP change nothing, a cable that is out for a moment does not matter, one that stays
out ends the job."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Hosts
from tests.cluster.test_slurm import TRAIN, folder, losses, undisturbed, wait_for  # noqa: F401 - fixtures
from tests.launch import _ONE_THREAD, _OPEN_MPI, ROOT, TOKEN, _end, clean_env, is_open_mpi

pytestmark = [pytest.mark.mpi, pytest.mark.cluster]
LONG = [*TRAIN, "train.steps=100000"]


class Job:
    """`mpshard launch` on h0 with two ranks on each host, running beside the test."""

    def __init__(self, hosts: Hosts, folder: Path, *train: str) -> None:  # noqa: F811
        self.token, self.log = f"{folder.name}-{time.monotonic_ns()}", folder / "log"
        policy = {name: value for name, value in _OPEN_MPI.items() if name != "PRTE_MCA_rmaps_default_mapping_policy"}
        env = clean_env(_ONE_THREAD | (policy if is_open_mpi() else {})) | hosts.env | {
            # Hosts count their processes from 1 and share /tmp: Open MPI's folders there, named after them, would collide.
            "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), TOKEN: self.token}
        command = [sys.executable, "-m", "mpshard", "launch", "-n", "4", "--hosts", "h0:2,h1:2", "--", "train", *train]
        self.output = self.log.open("wb")
        self.process = subprocess.Popen(hosts.inside("h0", *command), cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=self.output,
                                        stderr=self.output)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.said}") from None

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        _end(self.token)
        self.process.wait()
        self.output.close()


@pytest.fixture
def start(hosts: Hosts, folder: Path):  # noqa: F811
    jobs: list[Job] = []

    def begin(*train: str) -> Job:
        jobs.append(Job(hosts, folder, *train))
        return jobs[-1]

    yield begin
    for host in (0, 1):
        hosts.link(host, up=True)
    for job in jobs:
        job.end()


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_two_hosts_over_tcp_equal_one(start, folder, undisturbed, transport):  # noqa: F811
    job = start(*TRAIN, f"shard.transport={transport}")
    assert job.wait(300) == 0, job.said
    assert losses(folder / "run") == undisturbed


def test_a_cable_that_is_out_for_three_seconds_costs_a_line(start, hosts, folder, undisturbed):  # noqa: F811
    job = start(*TRAIN, "checkpoint.every=0")  # a checkpoint may take its time: nothing is said of that
    wait_for(lambda: len(losses(folder / "run")) >= 5, "five steps", job.log)
    hosts.link(1, up=False)
    time.sleep(3)
    hosts.link(1, up=True)
    assert job.wait(300) == 0, job.said
    assert losses(folder / "run") == undisturbed
    assert "now it goes on" in job.said and "[rank" not in job.said, job.said


def test_a_cable_that_stays_out_ends_the_job(start, hosts, folder):  # noqa: F811
    job = start(*LONG, "run.timeout=8", "checkpoint.every=0")
    wait_for(lambda: len(losses(folder / "run")) >= 5, "five steps", job.log)
    hosts.link(1, up=False)
    mend = threading.Timer(60, lambda: hosts.link(1, up=True))  # a launcher may need it to end its own part on the other host
    mend.start()
    try:
        assert job.wait(120) != 0
    finally:
        mend.cancel()
    assert "stalled for " in job.said, job.said
    places = [json.loads(path.read_text()) for path in (folder / "run" / "stalled").glob("rank-*.json")]
    assert {place["rank"] for place in places} == {0, 1, 2, 3}  # on one file system here; else each host's own
    assert all(place["waits"] for place in places), places
