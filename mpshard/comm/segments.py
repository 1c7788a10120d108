"""Shared memory of a node must not outlive the job, however it ends.

Both libraries keep a name under /dev/shm for segments that all ranks of the node have long mapped, and remove it when they
finish in good order: a killed rank leaks it (measured: MPICH's mpich_shm_*, Open MPI's sm_segment.*). A mapping needs no
name, so the names go as soon as everybody has mapped what they stand for.
"""

from __future__ import annotations

import os
from contextlib import suppress

from mpi4py import MPI

FOLDER = "/dev/shm/"


def unlink(comm: MPI.Comm) -> None:
    """Remove the names of the segments that all ranks of a node map. Collective."""
    if comm.size == 1 or not os.path.isdir(FOLDER):
        return
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    node.alltoall([None] * node.size)  # whoever maps a neighbour's segment at the first message has mapped it now
    everywhere = node.allgather(_mapped())
    if node.rank == 0:
        for path in set.intersection(*everywhere):
            with suppress(OSError):
                os.unlink(path)
    node.Free()


def _mapped() -> set[str]:
    """Paths under /dev/shm that this process has mapped and that still exist."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if FOLDER in line}
    return {path for path in paths if path.startswith(FOLDER) and not path.endswith(" (deleted)")}
