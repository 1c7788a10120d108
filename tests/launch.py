"""Start ranks under the MPI at hand, with a hard time limit and every rank's output kept apart.

The process that calls `launch` never imports MPI itself: a hung or aborted job must not take the
test run with it, and a process that has initialised MPI cannot start another job.

Note on finding one's own processes. MPICH's launcher gives each rank a session of its own, Open MPI's
a process group of its own, so ending "the process group" ends the launcher alone and leaves ranks
computing. Each launch therefore puts a token into the environment, and whatever process carries it
(`/proc/PID/environ`) belongs to the launch, however it was started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMED_OUT = 124  # the exit status that coreutils' `timeout` gives

TOKEN = "MPSHARD_TEST_LAUNCH"
CACHE = "MPSHARD_TEST_CACHE"  # a folder that outlives a launch
DEVICE = "MPSHARD_TEST_DEVICE"  # where tests inside ranks train, see `tests/where.py`: "cupy", the stand-in for it; else NumPy
# What launchers tell their ranks. A job started from inside a job must not see it: it would join the outer one.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "HYDI_", "MPI_", "SLURM_", TOKEN)
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# One core a rank: more threads than cores make every test slower and say nothing more.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Open MPI refuses root, and more ranks than cores, unless told; ranks that wait without yielding starve the others.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Each rank writes its own files ($0 is the folder). No core files: a rank past its limit is ended by SIGABRT.
_REDIRECT = (
    'ulimit -c 0; rank="${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-0}}}"; exec "$@" >"$0/$rank.out" 2>"$0/$rank.err"'
)
# Segments that MPICH, Open MPI and UCX leave behind when a rank is killed before it could unlink them.
_SEGMENTS = ("mpich_", "sm_segment.", "osc_sm.", "ucx_shm_", "open_mpi.", "mpshard")


under_way: set[str] = set()  # tokens of launches that have not come to their end


def end_all() -> None:
    """End whatever is under way, on any thread, and wait for its `launch` to have cleaned up."""
    while under_way:
        for token in list(under_way):
            _end(token)
        time.sleep(0.02)


@dataclass(frozen=True)
class Result:
    """What a launch left behind. `logs[r]` is everything rank r wrote, standard output first."""

    command: tuple[str, ...]
    returncode: int  # the launcher's exit status; 124 if the time limit ended the job
    stdout: str  # standard output of all ranks, rank 0's first
    stderr: str  # standard error of all ranks, rank 0's first, then what the launcher itself said
    logs: tuple[str, ...]
    orphans: int  # processes that outlived the launcher by more than two seconds (they have been ended)
    leaked: tuple[str, ...]  # shared-memory segments nobody holds any more (they have been removed)

    @property
    def timed_out(self) -> bool:
        return self.returncode == TIMED_OUT

    def report(self) -> str:
        """All logs, for the message of a failed assertion."""
        parts = [f"$ {' '.join(self.command)}", f"exit status {self.returncode}"]
        parts += [f"----- rank {rank} -----\n{log.rstrip()}" for rank, log in enumerate(self.logs)]
        return "\n".join([*parts, f"----- standard error -----\n{self.stderr.rstrip()}"])


@cache
def mpiexec() -> str:
    """The launcher that belongs to this interpreter's environment, else the first one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"  # not resolved: in a virtual environment python is a link
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise RuntimeError("no mpiexec beside the interpreter or on PATH: install '.[mpich]' or '.[openmpi]'")
    return found


@cache
def is_open_mpi() -> bool:
    """Whether that launcher is Open MPI's (otherwise MPICH's or one of its kin)."""
    ask = [mpiexec(), "--version"]
    version = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60, env=clean_env())
    return "Open MPI" in version.stdout


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without a launcher's variables, so that a child does not believe it is a rank."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    return env | dict(extra or {})


def launch(
    n: int,
    args: Sequence[str | os.PathLike[str]],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ROOT,
    launcher: Sequence[str] = (),
) -> Result:
    """Run `mpiexec -n N python ARGS` and wait for its end, `timeout` seconds at most. launcher: instead of mpiexec.

    For instance `launch(2, ["-m", "mpshard", "train", "tiny.toml"])`. Past the limit every rank is made to
    print the stack of all its threads, then the whole job is ended and `returncode` is 124. `env` is added to
    the environment, in which `mpshard` is this checkout and every rank computes with one thread.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    token = uuid.uuid4().hex
    start, rank = (*(launcher or (mpiexec(),)), "-n", str(n)), (sys.executable, *map(os.fspath, args))
    command, wrapped = (*start, *rank), [*start, "sh", "-c", _REDIRECT, str(folder), *rank]
    full_env = clean_env(_ONE_THREAD | (_OPEN_MPI if is_open_mpi() else {})) | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",  # a rank that is killed has still said what it said
        "PYTHONFAULTHANDLER": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # hundreds of ranks read the same sources
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of pytest in the ranks: plugins nobody there uses, most of its start
        "TMPDIR": str(folder),  # the launcher's sessions and pytest's temporary folders go when the job goes
        TOKEN: token,
        CACHE: os.environ.get(CACHE, tempfile.gettempdir()),
        **(env or {}),
    }
    segments = _segments()
    under_way.add(token)
    try:
        with open(folder / "launcher", "wb") as said:
            job = subprocess.Popen(
                wrapped, cwd=cwd, env=full_env, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip
            try:
                returncode = job.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = TIMED_OUT
                _dump_stacks(token)
            _wait_until(lambda: not _processes(token), seconds=0 if returncode == TIMED_OUT else 2)
            orphans = 0 if returncode == TIMED_OUT else len(_processes(token))
        out = [_read(folder / f"{rank}.out") for rank in range(n)]
        err = [_read(folder / f"{rank}.err") for rank in range(n)]
        launcher = _read(folder / "launcher")
    finally:  # also when a person stops the test run with Ctrl-C
        _end(token)
        job.wait()
        under_way.discard(token)
        leaked = _remove_segments(segments) if job.returncode else ()
        shutil.rmtree(folder, ignore_errors=True)
    logs = tuple(o + e for o, e in zip(out, err, strict=True))
    return Result(command, returncode, "".join(out), "".join([*err, launcher]), logs, orphans, leaked)


def _processes(token: str) -> list[tuple[int, bool]]:
    """(process id, is it a rank) of every live process that carries the token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()  # a zombie's is empty
            except OSError:
                continue  # gone, or somebody else's
            variables = environ.split(b"\0")
            if f"{TOKEN}={token}".encode() in variables:
                names = {variable.partition(b"=")[0].decode(errors="replace") for variable in variables}
                found.append((int(entry.name), not names.isdisjoint(_RANK_VARIABLES)))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _dump_stacks(token: str) -> None:
    """Make every rank print its stacks. The launcher is held, or it would kill the others at the first death."""
    processes = _processes(token)
    for pid, is_rank in processes:
        if not is_rank:
            _signal(pid, signal.SIGSTOP)
    for pid, is_rank in processes:
        if is_rank:
            _signal(pid, signal.SIGABRT)
    _wait_until(lambda: not any(is_rank for _, is_rank in _processes(token)), seconds=3)


def _end(token: str) -> None:
    """Kill whatever carries the token, until nothing does."""
    while processes := _processes(token):
        for pid, _ in processes:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def _segments() -> set[str]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return set()
    return {str(path) for path in shm.iterdir() if path.name.startswith(_SEGMENTS)}


def _remove_segments(before: set[str]) -> tuple[str, ...]:
    """Remove the segments that came since `before` and that no live process maps: ours, not a neighbour's."""
    fresh = _segments() - before
    if not fresh:
        return ()
    time.sleep(0.1)  # a neighbour that created one an instant ago has mapped it by now
    mapped = "".join(_read(path) for path in Path("/proc").glob("[0-9]*/maps"))
    leaked = tuple(sorted(path for path in fresh if path not in mapped))
    for path in leaked:
        Path(path).unlink(missing_ok=True)
    return leaked


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
