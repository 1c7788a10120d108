"""The MPI at hand: its launcher, and what has to be said to it. Imports no MPI: who starts a job must not be in one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpshard.config import ConfigError

# Open MPI refuses root, and more ranks than cores, unless told; ranks that wait without yielding starve the others.
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CROWDED = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none",
           "OMPI_MCA_mpi_yield_when_idle": "1"}
# What ranks on other hosts need of our environment; MPICH's launcher passes all of it.
PASSED = ("PYTHONPATH", "LD_LIBRARY_PATH")
PASSED_PREFIXES = ("OMP_", "OPENBLAS_", "MKL_", "MPSHARD_")


@dataclass(frozen=True)
class Start:
    """A command line and its environment. notices: what was decided for the user, a line each."""

    command: list[str]
    env: dict[str, str]
    notices: list[str] = field(default_factory=list)


def find() -> str:
    """The launcher beside this interpreter, else the first on PATH. ConfigError if there is none."""
    beside = Path(sys.executable).parent / "mpiexec"  # not resolved: in a virtual environment python is a link
    found = str(beside) if beside.exists() else shutil.which("mpiexec") or shutil.which("mpirun")
    if found is None:
        raise ConfigError("no mpiexec beside this Python or on PATH: pip install 'mpshard[mpich]', or load your system's MPI")
    return found


def is_open_mpi(path: str) -> bool:
    """Whether a launcher is Open MPI's; otherwise it is taken for MPICH's or one of its kin. ConfigError if it does not run."""
    try:
        said = subprocess.run([path, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{path} does not run: {error}") from None
    return "Open MPI" in said


def plan(n: int, hosts: str, words: Sequence[str], environ: Mapping[str, str], *, path: str, open_mpi: bool, root: bool,
         cores: int) -> Start:
    """How to start `n` ranks of `mpshard WORDS`.

    hosts: "h0:2,h1:2", hosts and ranks on each; empty: here. environ: ours; what it says already is left alone. root:
    whether we are. cores: on this machine.
    """
    env, notices, options = dict(environ), [], ["-n", str(n)]
    if hosts:
        options = ["--host" if open_mpi else "-hosts", hosts, *options]
    if open_mpi:
        if root and not environ.keys() >= ROOT.keys():
            env |= ROOT
            notices.append("Open MPI does not start for root; told to (OMPI_ALLOW_RUN_AS_ROOT)")
        if n > cores and not hosts and not environ.keys() & CROWDED.keys():
            env |= CROWDED
            notices.append(f"{n} ranks on {cores} cores: Open MPI told to oversubscribe, not to bind, and to yield while it waits")
        if hosts:
            passed = sorted(name for name in env if name in PASSED or name.startswith(PASSED_PREFIXES))
            options += [word for name in passed for word in ("-x", name)]
    return Start([path, *options, sys.executable, "-m", "mpshard", *words], env, notices)


def plan_here(n: int, hosts: str, words: Sequence[str], environ: Mapping[str, str]) -> Start:
    """`plan` with the MPI of this environment, on this machine."""
    path = find()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return plan(n, hosts, words, environ, path=path, open_mpi=is_open_mpi(path), root=os.geteuid() == 0, cores=cores)
