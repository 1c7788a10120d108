"""Under a real Slurm with two virtual nodes: trained, preempted, requeued, resumed, completed; failures end the step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.conftest import Slurm
from tests.cluster.test_failures import DRIVER, FAULTY, SETTINGS, STEP, causes
from tests.launch import _ONE_THREAD, ROOT, TIMED_OUT, clean_env, is_open_mpi, launch

pytestmark = [pytest.mark.mpi, pytest.mark.cluster]

STEPS = 600  # a quarter of a minute: Slurm takes seconds to preempt
TRAIN = ["empty.toml", *SETTINGS, f"train.steps={STEPS}", "train.global_batch_size=8", "shard.deterministic=true", "run.timeout=60"]


def mpi_type() -> str:
    return "pmix" if is_open_mpi() else "pmi2"


def env() -> dict[str, str]:
    """What jobs need: this Python and this checkout, no other launcher's variables."""
    yielding = {"OMPI_MCA_mpi_yield_when_idle": "1"} if is_open_mpi() else {}  # four ranks on two cores
    return clean_env(_ONE_THREAD | yielding) | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_MPI_TYPE": mpi_type()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty.toml").touch()
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 100)
    return tmp_path


def lines(run: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    except OSError:
        return []


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(run) if "loss" in line]


def wait_for(condition: Callable[[], object], what: str, log: Path | None = None, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        said = log.read_text() if log is not None and log.exists() else ""
        assert time.monotonic() < end, f"waited too long for {what}\n{said}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[tuple[int, float]]:
    """The losses of four ranks on one host, without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "empty.toml").touch()
    (folder / "text.txt").write_text("All happy families are alike. " * 100)
    result = launch(4, ["-m", "mpshard", "train", *TRAIN], 180, cwd=folder)
    assert result.returncode == 0, result.report()
    return losses(folder / "run")


def submit(slurm: Slurm, folder: Path, *options: str, settings: tuple[str, ...] = ()) -> str:
    arguments = ["sbatch", "--parsable", "--output=job.log", *options, str(ROOT / "slurm" / "train_cpu.sbatch"), *TRAIN, *settings]
    return slurm.run(*arguments, cwd=folder, **env())


def wait_for_end(slurm: Slurm, job: str, run: Path, log: Path) -> None:
    """Until the run is done. Slurm lets a requeued job wait for two minutes; it is told to make it ten seconds, enough for a node
    to have done with the first try: until then it refuses the second."""
    hurried = False

    def done() -> bool:
        nonlocal hurried
        if not hurried and "JobState=PENDING" in slurm.run("scontrol", "show", "job", job):
            with suppress(subprocess.CalledProcessError):  # still on its way into the queue
                slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now+10")
                hurried = True
        return (run / "done.json").exists()

    wait_for(done, f"the end of job {job}", log)


def test_preempted_requeued_resumed_completed(slurm, folder, undisturbed):
    """2 nodes x 2 ranks; a job of a partition that comes first takes the nodes away for a moment."""
    run, log = folder / "run", folder / "job.log"
    job = submit(slurm, folder, "--partition=debug")
    wait_for(lambda: len(losses(run)) >= 6, "six steps", log)
    urgent = slurm.run("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--ntasks-per-node=2", "--output=/dev/null",
                       "--wrap=sleep 3", cwd=folder)
    wait_for(lambda: [line for line in lines(run) if line.get("event") == "preempted"], "the preemption", log)
    (left,) = [line["step"] for line in lines(run) if line.get("event") == "preempted"]
    assert 6 <= left < STEPS
    wait_for_end(slurm, job, run, log)
    assert f"resumed from run/checkpoints/step-{left:08} at step {left}" in log.read_text()
    assert losses(run) == undisturbed
    wait_for(lambda: "COMPLETED" in slurm.run("scontrol", "show", "job", job), "Slurm's word that it completed", log)
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)
    assert "COMPLETED" in slurm.run("scontrol", "show", "job", urgent)


def test_out_of_time_requeued_and_completed_on_one_node(slurm, folder, undisturbed):
    """The script asks for USR1 before its limit; here it is sent by hand, as Slurm sends it: to the job's steps."""
    run, log = folder / "run", folder / "job.log"
    job = submit(slurm, folder, "--partition=debug", "--nodes=1", "--ntasks-per-node=2")
    wait_for(lambda: len(losses(run)) >= 6, "six steps", log)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for_end(slurm, job, run, log)
    assert losses(run) == undisturbed  # by two ranks instead of four
    assert "asked to leave: checkpoint written at step" in log.read_text()
    wait_for(lambda: "COMPLETED" in slurm.run("scontrol", "show", "job", job), "Slurm's word that it completed", log)


@pytest.mark.parametrize(("how", "words"), [
    ("raise", "ValueError: boom"), ("exit", "this rank left while the others were still at work"), ("exit 0", "this rank left"),
    ("memory", "Unable to allocate 1.00 GiB"), ("SIGKILL", ""), ("SIGTERM", "checkpoint written at step"), ("stall", "is at step 7"),
    ("SIGINT", "interrupted")])
def test_failures_end_the_step(slurm, folder, how, words):
    srun = ("srun", "--nodes=2", f"--mpi={mpi_type()}", "--kill-on-bad-exit=1", "--unbuffered")
    arguments = [str(DRIVER), how, str(FAULTY), str(STEP), "train", *TRAIN[:-1], "train.steps=100000", "run.timeout=10"]
    result = launch(4, arguments, 120, env=slurm.env | {"OMPI_MCA_mpi_yield_when_idle": "1"}, cwd=folder, launcher=srun)
    assert result.returncode not in (0, TIMED_OUT), result.report()
    assert result.orphans == 0, result.report()
    assert words in "\n".join([*causes(result), result.stderr]), result.report()
    if how == "SIGTERM":
        assert result.returncode == 75, result.report()
    assert not (folder / "run" / "done.json").exists()


def test_the_wrong_kind_of_launch_is_refused(slurm, folder):
    """Without the right PMI every rank would be a world of its own, or MPI does not start; none must train."""
    result = launch(4, ["-m", "mpshard", "train", *TRAIN], 120, env=slurm.env, cwd=folder, launcher=("srun", "--nodes=2", "--mpi=none"))
    assert result.returncode != 0 and result.returncode != TIMED_OUT, result.report()
    assert not (folder / "run" / "metrics.jsonl").exists()
    if "mpshard: " in result.stderr:
        assert "SLURM_STEP_NUM_TASKS=4" in result.stderr and result.stderr.count("mpshard: ") == 1, result.report()
