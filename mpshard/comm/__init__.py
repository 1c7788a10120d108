"""Everything that touches MPI: the mesh, collectives that own their buffers, how units travel, how a job ends.

Importing this room imports mpi4py.MPI and so initialises MPI; nothing outside imports it before it is needed.
"""

import os

# Open MPI tries its UCX component for every window, shared memory included, and each rank prints an error about it.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

from mpi4py import MPI

world = MPI.COMM_WORLD


def ranks_on_node(comm: MPI.Comm) -> int:
    """How many ranks of `comm` share this rank's memory. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return size


__all__ = ["ranks_on_node", "world"]
