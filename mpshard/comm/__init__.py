"""Everything that touches MPI: the mesh, collectives that own their buffers, how units travel, how a job ends.

Importing this room imports mpi4py.MPI and so initialises MPI; nothing outside imports it before it is needed.
"""

from mpi4py import MPI

world = MPI.COMM_WORLD

__all__ = ["world"]
