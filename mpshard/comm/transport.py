"""How a unit travels: the two verbs of sharding, gather and reduce, and the buffers that they need."""

from __future__ import annotations

from typing import Protocol

from mpi4py import MPI

from mpshard.comm import collectives
from mpshard.comm.collectives import Pending, Progress
from mpshard.device.base import Array, Device, Kind


class Transport(Protocol):
    """Moves flat units between slices and full buffers. All ranks make the same calls in the same order."""

    name: str
    bytes_gathered: int  # received by this rank so far
    bytes_reduced: int  # sent by this rank so far

    def empty(self, size: int, dtype: object, kind: Kind) -> Array:
        """A buffer that this transport can gather into or reduce from."""

    def gather(self, shard: Array, full: Array) -> Pending:
        """Start collecting every rank's slice (m,) into full (world * m,)."""

    def reduce(self, full: Array, out: Array, accumulate: bool) -> Pending:
        """Start summing full (world * m,) over ranks; `wait` has put this rank's slice into out (m,), or added it."""


class MessageTransport:
    """Plain MPI messages.

    ordered: reduce by an all-to-all and a local sum in rank order instead of MPI's reduce-scatter. It moves
    the same bytes as a ring, fixes the order of the sum, and works for types MPI cannot add.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm, device: Device, progress: Progress, ordered: bool = False) -> None:
        # A communicator of its own: collectives of different kinds in flight must not depend on who else calls.
        self.comm, self.device, self.progress, self.ordered = comm.Dup(), device, progress, ordered
        self.bytes_gathered = self.bytes_reduced = 0

    def empty(self, size: int, dtype: object, kind: Kind) -> Array:
        return self.device.empty(size, dtype, kind)

    def gather(self, shard: Array, full: Array) -> Pending:
        self.bytes_gathered += full.nbytes - shard.nbytes
        return collectives.all_gather(self.comm, self.progress, shard, full)

    def reduce(self, full: Array, out: Array, accumulate: bool) -> Pending:
        self.bytes_reduced += full.nbytes - out.nbytes
        device, world = self.device, self.comm.size
        if self.ordered or out.size > collectives.COUNT_LIMIT:
            parts = device.empty(full.size, full.dtype, Kind.STAGING)
            return collectives.all_to_all(
                self.comm, self.progress, full, parts,
                then=lambda: device.ordered_sum(parts.reshape(world, -1), out, accumulate))
        if not accumulate:
            return collectives.reduce_scatter(self.comm, self.progress, full, out)
        summed = device.empty(out.size, out.dtype, Kind.STAGING)
        return collectives.reduce_scatter(self.comm, self.progress, full, summed, then=lambda: device.add(out, summed))
