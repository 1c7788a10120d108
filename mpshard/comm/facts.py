"""What MPI is and where its ranks sit: facts for `mpshard doctor`, no judgement."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpshard.device.blas import available_cores

if TYPE_CHECKING:
    from mpi4py import MPI  # imported where it is used: the doctor's judgement is tested without MPI

PROBE = 8 << 20  # bytes sent to measure a link


@dataclass(frozen=True)
class RankFacts:
    """One rank, as it sees itself.

    node: number of the first rank on its node. affinity: cores it may run on. cores: how many of them it has to itself,
    within a container's quota. shm: size and free bytes of /dev/shm, None without one. link: bytes a second that the
    first rank of a node receives from the next node's; 0 elsewhere, or with one node.
    """

    rank: int
    host: str
    node: int
    affinity: tuple[int, ...]
    cores: int
    library: str
    versions: dict[str, str]
    shm: tuple[int, int] | None
    link: float


@dataclass(frozen=True)
class MpiFacts:
    """library: name and version; standard: of the MPI document; threads: the level in force, of "single", "funneled",
    "serialized" and "multiple"."""

    library: str
    standard: str
    threads: str


def mpi_facts() -> MpiFacts:
    """What this rank's MPI says of itself."""
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
              MPI.THREAD_MULTIPLE: "multiple"}
    # MPICH: "MPICH Version:      5.0.2\n..."; Open MPI: "Open MPI v5.0.11, package: ...".
    first = MPI.Get_library_version().strip("\0\n ").splitlines()[0].split(",")[0]
    return MpiFacts(" ".join(first.replace("Version:", "").split()), ".".join(map(str, MPI.Get_version())), levels[MPI.Query_thread()])


def rank_facts(comm: MPI.Comm, versions: Mapping[str, str]) -> list[RankFacts]:
    """Every rank's facts, on every rank. Collective. versions: of packages, added to Python's and MPI's."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    first = node.bcast(comm.rank)
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    cores = max(1, available_cores() // node.allgather(affinity).count(affinity))
    status = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    shm = (status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize) if status else None
    mine = RankFacts(comm.rank, socket.gethostname(), first, affinity, cores, mpi_facts().library,
                     {"python": platform.python_version(), **versions}, shm, _link(comm, node))
    node.Free()
    return comm.allgather(mine)


def _link(comm: MPI.Comm, node: MPI.Comm) -> float:
    """Bytes a second between the first ranks of neighbouring nodes, all links at once; 0 for other ranks. Collective."""
    from mpi4py import MPI

    leaders = comm.Split(0 if node.rank == 0 else MPI.UNDEFINED, comm.rank)
    if leaders == MPI.COMM_NULL:
        return 0.0
    rate = 0.0
    if leaders.size > 1:
        send, recv = np.zeros(PROBE, np.uint8), np.empty(PROBE, np.uint8)
        for _ in range(2):  # the first opens the connection
            leaders.Barrier()
            start = time.perf_counter()
            leaders.Sendrecv(send, (leaders.rank - 1) % leaders.size, recvbuf=recv, source=(leaders.rank + 1) % leaders.size)
            rate = PROBE / (time.perf_counter() - start)
    leaders.Free()
    return rate
