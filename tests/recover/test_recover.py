"""The parts of recovery that need no ranks: who is slow, what differs, how a launcher is called, what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpshard.commands import launch as command
from mpshard.config import ConfigError
from mpshard.recover import leftovers, supervise
from mpshard.recover.alike import difference
from mpshard.recover.mpiexec import plan
from mpshard.recover.stragglers import WINDOW, Stragglers, spread
from tests.launch import clean_env


# -- stragglers ------------------------------------------------------------------------------
def told(work: list[float], step_s: float, steps: int = WINDOW) -> list[str]:
    stragglers = Stragglers(["h0", "h0", "h1", "h1"])
    return [line for _ in range(steps) if (line := stragglers.add(np.array(work), step_s))]


def test_a_slow_rank_is_named_with_its_host_and_its_cost():
    (line,) = told([0.10, 0.10, 0.11, 0.15], 0.2)
    assert line.startswith("rank 3 (h1) is slow: it works 150.0 ms a step, the median rank 105.0 ms; that is 22% of a step's 200.0 ms")
    assert len(told([0.10, 0.10, 0.11, 0.15], 0.2, steps=3 * WINDOW)) == 3


def test_below_a_tenth_of_a_step_or_for_a_moment_it_is_not_worth_a_word():
    assert told([0.10, 0.10, 0.10, 0.11], 0.12) == []
    assert told([0.1, 0.1, 0.1, 9.0], 0.2, steps=WINDOW - 1) == []


def test_spread():
    assert spread(np.array([3.0, 1.0, 2.0])) == [1.0, 2.0, 3.0]


# -- alike -----------------------------------------------------------------------------------
def test_ranks_that_are_alike():
    assert difference(["a", "b"], [{"x": 1, "y": (1, 2)}] * 2) is None


@pytest.mark.parametrize(("facts", "words"), [
    ([{"optim.lr": 1e-3}, {"optim.lr": 1e-3}, {"optim.lr": 2e-3}], "optim.lr is 0.001 on 2 of 3 ranks, 0.002 on rank 2 (h2)"),
    ([{"mpshard": "0.1.0"}, {"mpshard": "0.2.0"}, {"mpshard": "0.2.0"}], 'mpshard is "0.2.0" on 2 of 3 ranks, "0.1.0" on rank 0 (h0)'),
    ([{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}], "b is 2 on 2 of 3 ranks, missing on rank 1 (h1)"),
])
def test_what_differs_is_named_with_its_rank(facts, words):
    assert difference(["h0", "h1", "h2"], facts) == f"ranks differ: {words}"


# -- launching -------------------------------------------------------------------------------
def planned(environ: dict[str, str] | None = None, *, n: int = 2, hosts: str = "", open_mpi: bool = True, root: bool = False):
    return plan(n, hosts, ["train", "x.toml"], environ or {}, path="/bin/mpiexec", open_mpi=open_mpi, root=root, cores=2)


def test_plain_starts():
    for open_mpi in (True, False):
        start = planned(open_mpi=open_mpi)
        assert start.command == ["/bin/mpiexec", "-n", "2", sys.executable, "-m", "mpshard", "train", "x.toml"]
        assert start.env == {} and start.notices == []


def test_hosts_in_each_launchers_words():
    environ = {"PYTHONPATH": "/src", "OMP_NUM_THREADS": "1", "HOME": "/"}
    assert planned(environ, hosts="h0:1,h1:1", open_mpi=False).command[1:5] == ["-hosts", "h0:1,h1:1", "-n", "2"]
    assert planned(environ, hosts="h0:1,h1:1").command[1:9] == ["--host", "h0:1,h1:1", "-n", "2", "-x", "OMP_NUM_THREADS", "-x",
                                                                "PYTHONPATH"]


def test_open_mpi_is_told_what_it_insists_on_and_the_user_hears_of_it():
    start = planned(root=True)
    assert start.env == {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} and len(start.notices) == 1
    start = planned(n=4)
    assert start.env["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe" and "4 ranks on 2 cores" in start.notices[0]
    mine = {"PRTE_MCA_hwloc_default_binding_policy": "core"}
    assert planned(mine, n=4).env == mine  # somebody who has thought about it
    assert planned(n=4, hosts="h0:2,h1:2").notices == []  # the policy would put all ranks on the first host
    assert planned(n=4, root=True, open_mpi=False).env == {}


@pytest.mark.parametrize("words", [[], ["eval", "x"], ["train"]])
def test_only_training_is_launched(words):
    with pytest.raises(ConfigError, match="after -- comes a train command"):
        supervise.run_directory(words)


def test_the_cause_of_an_end_is_one_line():
    assert supervise.cause([]) == "no rank could say why (killed from outside?)"
    assert supervise.cause(["", "some noise"]) == "some noise"
    assert supervise.cause(["prterun noticed that process rank 0 with PID 9 on node vm exited on", "signal 9 (Killed).", "bye"]) == \
        "signal 9 (Killed)."
    assert supervise.cause(["mpshard: stopped", "exited on signal 9"]) == "mpshard: stopped"
    assert supervise.cause(["mpshard: x", "[rank 1 of 2] Traceback (most recent call last):", '[rank 1 of 2]   File "a.py"',
                            "[rank 1 of 2] ValueError: boom", "exited on signal 9"]) == "[rank 1 of 2] ValueError: boom"


def test_progress_is_the_latest_checkpoints_step(tmp_path):
    assert supervise.last_step(tmp_path) == -1
    (tmp_path / "checkpoints" / "step-00000120").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").symlink_to("step-00000120")
    assert supervise.last_step(tmp_path) == 120


def test_the_last_event(tmp_path):
    assert supervise.last_event(tmp_path) == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "event": "skip"}\n{"step": 2, "loss": 1.0}\n')
    assert supervise.last_event(tmp_path) == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "event": "stop"}\n')
    assert supervise.last_event(tmp_path) == "stop"


class Jobs:
    """In place of real jobs: each ends with a status after so many more checkpointed steps."""

    def __init__(self, folder: Path, ends: list[tuple[int, int, bool]]) -> None:
        self.folder, self.ends, self.commands, self.step = folder, iter(ends), [], 0
        (folder / "checkpoints").mkdir(parents=True)

    def __call__(self, command: list[str], env: dict[str, str], ranks_here: int) -> supervise.Attempt:
        self.commands.append(command)
        status, steps, done = next(self.ends)
        if steps:
            self.step += steps
            link = self.folder / "checkpoints" / "latest"
            link.unlink(missing_ok=True)
            link.symlink_to(f"step-{self.step:08}")
        if done:
            (self.folder / "done.json").touch()
        return supervise.Attempt(abs(status), ("mpshard: wrong" if status == 2 else "[rank 0 of 2] ValueError: boom",))


@pytest.mark.parametrize(("ends", "restarts", "status", "said"), [
    ([(0, 5, True)], 9, 0, ""),
    ([(1, 5, False), (0, 5, True)], 9, 0, "ended with status 1: [rank 0 of 2] ValueError: boom; restart 1 of 9 from step 5"),
    ([(1, 5, False)] * 3, 2, 1, "gave up after 2 restarts (--max-restarts)"),
    ([(1, 5, False), (1, 0, False), (3, 0, False)], 9, 3,
     "gave up: 2 restarts made no progress beyond step 5; the last ended with status 3"),
    ([(1, 0, False), (1, 0, False), (1, 5, False), (1, 0, False), (0, 5, True)], 9, 0, "restart 4 of 9 from step 5"),
    ([(0, 5, False), (0, 5, True)], 9, 0, "ended with status 0"),  # a status alone is not believed
    ([(9, 5, True)], 9, 0, ""),  # nor is that: all was done
    ([(75, 5, False)], 9, 75, ""),
    ([(2, 0, False)], 9, 2, ""),
    ([(-2, 5, False), (0, 5, True)], 9, 0, "ended with status 2"),  # MPICH's word for SIGINT
    ([(1, 5, False)], 0, 1, "ended with status 1"),
])
def test_restarts(tmp_path, monkeypatch, capsys, ends, restarts, status, said):
    jobs = Jobs(tmp_path / "run", ends)
    monkeypatch.setattr(supervise, "run", jobs)
    (tmp_path / "x.toml").touch()
    assert supervise.supervise(2, "", ["train", str(tmp_path / "x.toml"), f"run.dir={tmp_path / 'run'}"], restarts) == status
    assert len(jobs.commands) == len(ends)
    assert [command[-1] == "run.resume=auto" for command in jobs.commands] == [False] + [True] * (len(ends) - 1)
    assert said in capsys.readouterr().err


def test_a_launch_inside_a_launch_is_refused(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ConfigError, match="run it without mpirun or srun"):
        command.launch(None)


# -- leftovers -------------------------------------------------------------------------------
def test_what_a_job_leaves_is_found_by_its_token_and_ended():
    token = f"MPSHARD_TEST_TOKEN={os.getpid()}"
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=clean_env(dict([token.split("=")])),
                                start_new_session=True)
    while not leftovers.processes(token):
        time.sleep(0.01)
    assert leftovers.processes(token) == [sleeping.pid]
    assert leftovers.end(token, patience=0.1) == 1
    assert sleeping.wait(10) == -9
    assert leftovers.end(token, patience=0.1) == 0


def test_a_job_that_lacks_a_rank_is_ended(monkeypatch, capsys):
    """In place of a launcher: two ranks, of which one leaves."""
    monkeypatch.setattr(supervise, "LAUNCHERS_TIME", 1.0)
    monkeypatch.setattr(supervise, "LOOK_EVERY", 0.2)
    launcher = "PMI_RANK=0 sleep 600 & PMI_RANK=1 sleep 0.5 & wait"
    assert supervise.run(["sh", "-c", launcher], clean_env(), ranks_here=2).status == 128 + 9
    assert "a rank has left and the launcher has not noticed" in capsys.readouterr().err


def test_names_that_nobody_maps_are_removed_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "SHARED", tmp_path)
    (tmp_path / "mpich_shm_old").touch()
    before = leftovers.segments()
    for name in ("mpich_shm_leaked", "mpich_shm_mapped", "something_else"):
        (tmp_path / name).write_bytes(bytes(4096))
    mapped = np.memmap(tmp_path / "mpich_shm_mapped", np.uint8, "r")
    assert [path.name for path in leftovers.remove_segments(before)] == ["mpich_shm_leaked"]
    assert {path.name for path in tmp_path.iterdir()} == {"mpich_shm_old", "mpich_shm_mapped", "something_else"}
    assert mapped[0] == 0
