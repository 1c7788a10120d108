"""Whether this MPI can be given device memory: tried out, in processes of their own.

MPI has no reliable query for it, and a library that is not CUDA-aware takes a device pointer for one of the host and
crashes. So two small ranks exchange real device buffers in a job of their own: what crashes, hangs or comes back wrong
there is an answer here. `python -m mpshard.comm.cuda_probe` is what they run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 60.0  # after which the two ranks are taken to hang
PASSED = "device buffers arrived"
SIZE = 1 << 18  # elements a rank sends: beyond what MPI sends eagerly
# What launchers tell their ranks: with it the two would join our own job.
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "HYDI_", "MPI_", "SLURM_")


@dataclass(frozen=True)
class Verdict:
    """aware: device memory may be given to MPI. why: in one line."""

    aware: bool
    why: str


def probe(command: Sequence[str] | None = None, seconds: float = SECONDS) -> Verdict:
    """Start two ranks that exchange device memory, and see. command: what to start, for tests."""
    if command is None:
        launcher = _launcher()
        if launcher is None:
            return Verdict(False, "there is no mpiexec to try it with; set run.cuda_aware=yes if you know that it is")
        command = [launcher, "-n", "2", sys.executable, "-m", "mpshard.comm.cuda_probe"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"two ranks that exchange device memory hung for {seconds:.0f} s")
    except OSError as error:
        return Verdict(False, f"{command[0]} cannot be started: {error.strerror}")
    if done.returncode == 0 and done.stdout.count(PASSED) == 2:
        return Verdict(True, "two ranks exchanged device memory")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = f": {lines[-1].strip()[:100]}" if lines else ""
    return Verdict(False, f"two ranks that exchange device memory failed with status {done.returncode}{said}")


def _launcher() -> str | None:
    """The mpiexec of this interpreter's environment, else the first on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def exchange(name: str = "cupy") -> None:
    """What each of the two ranks does: both collectives that the transport uses, on device memory."""
    import numpy as np
    from mpi4py import MPI

    from mpshard.comm import collectives
    from mpshard.device import open_device

    comm = MPI.COMM_WORLD
    device = open_device(name, node_rank=comm.rank)
    mine = device.from_host(np.arange(comm.size * SIZE, dtype=np.float32) + comm.rank)
    gathered, exchanged = (device.zeros(comm.size * size, np.float32) for size in (comm.size * SIZE, SIZE))
    device.synchronise()
    for operation in (collectives.all_gather(comm, mine, gathered), collectives.all_to_all(comm, mine, exchanged)):
        for request in operation:
            assert isinstance(request, MPI.Request)
            request.Wait()
    rows = device.to_host(gathered).reshape(comm.size, -1)
    slices = device.to_host(exchanged).reshape(comm.size, -1)
    for rank in range(comm.size):
        assert (rows[rank] == np.arange(comm.size * SIZE, dtype=np.float32) + rank).all()
        assert (slices[rank] == np.arange(SIZE, dtype=np.float32) + comm.rank * SIZE + rank).all()
    print(PASSED, flush=True)


if __name__ == "__main__":
    exchange(*sys.argv[1:])
