"""Everything that touches MPI: the mesh, collectives that own their buffers, how units travel, how a job ends.

Importing mpi4py.MPI initialises MPI, so the names here do it when they are used, and most modules of this room when they
are imported; nothing outside imports those before it needs them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

    world: MPI.Comm

# Open MPI tries its UCX component for every window, shared memory included, and each rank prints an error about it.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

__all__ = ["ranks_on_node", "world"]


def __getattr__(name: str) -> Any:
    if name == "world":
        from mpi4py import MPI

        return MPI.COMM_WORLD
    raise AttributeError(f"module 'mpshard.comm' has no attribute {name!r}")


def ranks_on_node(comm: MPI.Comm) -> int:
    """How many ranks of `comm` share this rank's memory. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return size
