"""How a unit travels: the two verbs of sharding, gather and reduce, and the memory that they work on."""

from __future__ import annotations

from typing import Any, Protocol

from mpi4py import MPI

from mpshard.comm import collectives
from mpshard.comm.collectives import Pending, Progress
from mpshard.device.base import Array, Device, Kind


class Store:
    """This rank's lasting slice of a unit.

    local (m,): the slice, zero at first.
    """

    def __init__(self, local: Array) -> None:
        self.local = local


class Slot:
    """A buffer that units are gathered into, or gradients written to, one after another.

    private: no other rank reads the same memory.
    """

    private = True

    def __init__(self, array: Array) -> None:
        self.array = array

    def acquire(self) -> None:
        """Return when this rank may write to the buffer: others may still be reading what it held."""


class Transport(Protocol):
    """Moves flat units between slices and full buffers. All ranks make the same calls in the same order.

    in_place: a gather needs no slot, because the full unit lies together already.
    bytes_gathered, bytes_reduced: what this rank had to receive for gathers and to send for reduces so far, counted
        as (world - 1) slices each, whether as messages or through shared memory.
    """

    name: str
    in_place: bool
    bytes_gathered: int
    bytes_reduced: int

    def store(self, size: int, dtype: Any, kind: Kind) -> Store:
        """Memory for a slice of `size` elements; collective."""

    def slot(self, size: int, dtype: Any, kind: Kind) -> Slot:
        """Memory for a full unit or gradient of up to `size` elements; collective."""

    def gather(self, store: Store, slot: Slot | None) -> Pending:
        """Start collecting every rank's slice (m,); `wait` returns the full vector (world * m,)."""

    def release(self, slot: Slot | None) -> None:
        """This rank no longer reads what it gathered into the slot."""

    def reduce(self, slot: Slot, size: int, out: Array, accumulate: bool) -> Pending:
        """Start summing the slot's first `size` elements over ranks; `wait` has put this rank's slice of the sum
        into out (m,), or added it."""


class MessageTransport:
    """Plain MPI messages.

    ordered: reduce by an all-to-all and a local sum in rank order instead of MPI's reduce-scatter. It moves
    the same bytes as a ring, fixes the order of the sum, and works for types MPI cannot add.
    """

    name = "mpi"
    in_place = False

    def __init__(self, comm: MPI.Comm, device: Device, progress: Progress, ordered: bool = False) -> None:
        # A communicator of its own: its collectives' order must not depend on who else calls.
        self.comm, self.device, self.progress, self.ordered = comm.Dup(), device, progress, ordered
        self.bytes_gathered = self.bytes_reduced = 0

    def store(self, size: int, dtype: Any, kind: Kind) -> Store:
        return Store(self.device.zeros(size, dtype, kind))

    def slot(self, size: int, dtype: Any, kind: Kind) -> Slot:
        return Slot(self.device.empty(size, dtype, kind))

    def gather(self, store: Store, slot: Slot | None) -> Pending:
        full = slot.array[: store.local.size * self.comm.size]
        self.bytes_gathered += full.nbytes - store.local.nbytes
        return self.progress.start(Pending(collectives.all_gather(self.comm, store.local, full), full))

    def release(self, slot: Slot | None) -> None:
        pass

    def reduce(self, slot: Slot, size: int, out: Array, accumulate: bool) -> Pending:
        full, device, world = slot.array[:size], self.device, self.comm.size
        self.bytes_reduced += full.nbytes - out.nbytes
        if self.ordered or out.size > collectives.COUNT_LIMIT:
            parts = device.empty(size, full.dtype, Kind.STAGING)
            return self.progress.start(Pending(
                collectives.all_to_all(self.comm, full, parts), out,
                then=lambda: device.ordered_sum(parts.reshape(world, -1), out, accumulate)))
        if not accumulate:
            return self.progress.start(Pending(collectives.reduce_scatter(self.comm, full, out), out))
        summed = device.empty(out.size, out.dtype, Kind.STAGING)
        return self.progress.start(Pending(
            collectives.reduce_scatter(self.comm, full, summed), out, then=lambda: device.add(out, summed)))
