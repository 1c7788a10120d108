"""However one rank fails, the job ends everywhere, not with status 0, and says why once. (The limit of `launch` is the
clock: a job that it has to end has status 124.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch import _ONE_THREAD, _OPEN_MPI, ROOT, TIMED_OUT, Result, clean_env, is_open_mpi, launch, mpiexec

pytestmark = pytest.mark.mpi

# A command in which rank 1 fails in the way asked for and the others wait for it inside MPI.
COMMAND = """
import argparse, os, signal, sys, threading
from mpshard.cli import in_world
from mpshard.config import ConfigError

def fail(how):
    if how == "raise": raise ValueError("boom")
    if how == "exit": sys.exit(3)
    if how == "exit 0": sys.exit(0)
    if how == "thread": threading.Thread(target=lambda: {}["boom"]).start()
    if how == "signal": os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    if how == "leave": os._exit(3)
    if how == "pipe": raise BrokenPipeError()
    if how == "config": raise ConfigError("boom")

def run(arguments, world):
    how = sys.argv[1]
    if world.rank == world.size - 1 or how.startswith("all "):
        fail(how.removeprefix("all "))
    print("waiting", flush=True)
    if world.size > 1:
        world.recv(source=world.rank, tag=7)  # nobody ever sends
    threading.Event().wait()

sys.exit(in_world(run, argparse.Namespace()))
"""


def failing(n: int, *how: str) -> Result:
    result = launch(n, ["-c", COMMAND, *how], 40)
    assert result.returncode not in (0, TIMED_OUT), result.report()
    assert result.orphans == 0
    return result


def words(result: Result, n: int) -> list[str]:
    """What the ranks said, MPI's own words and the frames of tracebacks left out."""
    lines = [line for log in result.logs for line in log.splitlines()]
    return [line for line in lines if line.startswith("[rank ") and not line.startswith(f"[rank {n - 1} of {n}]   ")]


@pytest.mark.parametrize(("how", "status", "last"), [
    (["raise"], 1, "ValueError: boom"),
    (["thread"], 1, "KeyError: 'boom'"),
    (["exit"], 3, "this rank left while the others were still at work"),
    (["exit 0"], 1, "this rank left while the others were still at work"),
    (["signal", "SIGINT"], 130, "interrupted"),
    (["signal", "SIGTERM"], 143, "ended by SIGTERM"),
    (["config"], 2, "mpshard: boom"),
])
def test_one_rank_fails(how, status, last):
    result = failing(2, *how)
    assert result.returncode == status, result.report()
    said = words(result, 2)
    assert said[-1] == f"[rank 1 of 2] {last}", result.report()
    assert all(line.startswith("[rank 1 of 2]") for line in said)
    assert ("Traceback" in result.logs[1]) == (how[0] in ("raise", "thread", "exit", "exit 0"))
    assert "Traceback" not in result.logs[0]


@pytest.mark.parametrize("how", [["leave"], ["signal", "SIGKILL"]])
def test_what_no_program_can_report_is_the_launchers(how):
    assert words(failing(2, *how), 2) == []


def test_a_closed_output_is_not_worth_a_word():
    result = failing(2, "pipe")
    assert result.returncode == 141
    assert words(result, 2) == [] and "Traceback" not in result.stdout + result.stderr


def test_when_all_fail_alike_rank_0_speaks():
    """The others wait a moment, in which rank 0 usually has ended them."""
    assert failing(3, "all raise").logs[0].count("ValueError: boom") == 1


@pytest.mark.parametrize(("how", "status", "last"), [
    (["raise"], 1, "ValueError: boom"),
    (["thread"], 1, "KeyError: 'boom'"),
    (["exit"], 3, ""),
    (["config"], 2, "mpshard: boom"),
])
def test_alone(how, status, last):
    result = failing(1, *how)
    assert result.returncode == status, result.report()
    assert last in result.logs[0]


TRAIN = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "data.train=text", "data.seq_len=16", "train.steps=1000000",
         "train.global_batch_size=4", "train.micro_batch_size=1"]


@pytest.mark.parametrize(("n", "args", "sign"), [
    (3, ["-c", COMMAND, "wait"], "waiting"),  # inside MPI, where no Python runs
    (1, ["-m", "mpshard", "train", "empty.toml", *TRAIN], "step 1/1000000"),
    (2, ["-m", "mpshard", "train", "empty.toml", *TRAIN], "step 1/1000000"),
])
def test_ctrl_c_ends_the_job_quietly(n, args, sign, tmp_path):
    """SIGINT to the launcher, as a terminal sends it."""
    (tmp_path / "text").write_text("All happy families are alike. " * 9)
    (tmp_path / "empty.toml").touch()
    env = clean_env(_ONE_THREAD | (_OPEN_MPI if is_open_mpi() else {})) | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        job = subprocess.Popen([mpiexec(), "-n", str(n), sys.executable, *args], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
                               stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: sign in log.read_text())
        job.send_signal(signal.SIGINT)
        assert job.wait(30) != 0
    finally:
        job.kill()
        job.wait()
        wait_for(lambda: not alive(tmp_path), otherwise=lambda: [os.kill(pid, signal.SIGKILL) for pid in alive(tmp_path)])
    said = log.read_text()
    assert "Traceback" not in said and said.count("interrupted") <= 1, said


def start_alone(folder: Path) -> subprocess.Popen[str]:
    """A long training without a launcher, past its first step."""
    (folder / "text").write_text("All happy families are alike. " * 9)
    (folder / "empty.toml").touch()
    job = subprocess.Popen([sys.executable, "-m", "mpshard", "train", "empty.toml", *TRAIN], cwd=folder, text=True,
                           env=clean_env(_ONE_THREAD) | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while "step 1/1000000" not in job.stdout.readline():
        assert job.poll() is None
    return job


def test_ctrl_c_alone(tmp_path):
    job = start_alone(tmp_path)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=30)
    assert (job.returncode, said) == (130, "mpshard: interrupted\n")


@pytest.mark.parametrize("body", ["signal.raise_signal(signal.SIGINT)", "(lambda: signal.raise_signal(signal.SIGINT))()"])
def test_an_interrupt_in_a_destructor_is_not_lost(body):
    """Where Python drops exceptions, also those of what it calls; one Ctrl-C in fifty came while a buffer was given back."""
    code = """import signal, sys, time
from mpshard.comm import abort, world
class Held:
    def __del__(self): BODY
try:
    with abort.guarded(world):
        held = Held(); del held
        time.sleep(10)
except KeyboardInterrupt: sys.exit(7)""".replace("BODY", body)
    done = subprocess.run([sys.executable, "-c", code], env=clean_env({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True,
                          check=False)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_reader_that_has_had_enough_ends_a_job_alone(tmp_path):
    job = start_alone(tmp_path)
    job.stdout.close()
    assert job.wait(60) == 141
    assert job.stderr.read() == ""
    job.stderr.close()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_head_of_the_help_is_quiet(arguments):
    python = f"{sys.executable} -m mpshard {' '.join(arguments)}"
    done = subprocess.run(["sh", "-c", f"{python} | head -1; {python} | true"], cwd=ROOT, env=clean_env(), capture_output=True,
                          text=True, check=False)
    assert done.stdout.startswith("usage: mpshard") and done.stderr == ""


def wait_for(condition: Callable[[], object], otherwise: Callable[[], object] = lambda: None) -> None:
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            otherwise()
            raise AssertionError("waited too long")
        time.sleep(0.05)


def alive(folder: Path) -> list[int]:
    """Processes whose TMPDIR is the folder: they belong to the job."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
