"""How a unit travels: the two verbs of sharding, gather and reduce, and the memory that they work on."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpshard.comm import collectives
from mpshard.comm.collectives import Operation, Pending, Progress
from mpshard.device.base import Array, Device, Kind


class Store:
    """This rank's lasting slice of a unit.

    local (m,): the slice, zero at first.
    """

    def __init__(self, local: Array) -> None:
        self.local = local

    def written(self) -> None:
        """This rank has issued an update of the slice. Matters where a device works while the host goes on."""


class Slot:
    """A buffer that units are gathered into, or gradients written to, one after another.

    private: no other rank reads the same memory. cuts: views of it, for whoever wants the same ones every time.
    """

    private = True

    def __init__(self, array: Array) -> None:
        self.array = array
        self.cuts: dict[str, list[Array]] = {}

    def acquire(self) -> None:
        """Return when this rank may write to the buffer: others may still be reading what it held."""

    def written(self) -> None:
        """This rank has issued what it does with the buffer for now. Matters as `Store.written` does."""


class Transport(Protocol):
    """Moves flat units between slices and full buffers. All ranks make the same calls in the same order.

    comm: the ranks among which they move.
    in_place: a gather needs no slot, because the full unit lies together already.
    bytes_gathered, bytes_reduced: what this rank had to receive for gathers and to send for reduces so far, counted
        as (world - 1) slices each, whether as messages or through shared memory.
    """

    name: str
    comm: MPI.Comm
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

    def reduce(self, slot: Slot, size: int, out: Array, accumulate: bool, travels_as: Any = None) -> Pending:
        """Start summing the slot's first `size` elements over ranks; `wait` has put this rank's slice of the sum
        into out (m,), or added it.

        travels_as: a shorter type that each addend is rounded to (the slot's content may be, too); None: as it is.
        """

    def among(self, comm: MPI.Comm) -> Transport:
        """Messages of the same kind among other ranks, which sum in rank order; collective over `comm`."""

    def holding(self, array: Array) -> Slot:
        """A slot of `among` that is memory at hand, from now on."""


class HostTransport:
    """What transports of the host's memory have in common: buffers of a rank's own and, whatever they are, messages among others."""

    device: Device
    progress: Progress

    def store(self, size: int, dtype: Any, kind: Kind) -> Store:
        return Store(self.device.zeros(size, dtype, kind))

    def slot(self, size: int, dtype: Any, kind: Kind) -> Slot:
        return Slot(self.device.empty(size, dtype, kind))

    def release(self, slot: Slot | None) -> None:
        pass

    def among(self, comm: MPI.Comm) -> Transport:
        return MessageTransport(comm, self.device, self.progress, ordered=True)

    def holding(self, array: Array) -> Slot:
        return Slot(array)


class MessageTransport(HostTransport):
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

    def gather(self, store: Store, slot: Slot | None) -> Pending:
        assert slot is not None
        full = slot.array[: store.local.size * self.comm.size]
        self.bytes_gathered += full.nbytes - store.local.nbytes
        return self.progress.start(Pending(collectives.all_gather(self.comm, store.local, full), full))

    def reduce(self, slot: Slot, size: int, out: Array, accumulate: bool, travels_as: Any = None) -> Pending:
        full, device, world = slot.array[:size], self.device, self.comm.size
        rounded = travels_as is not None and np.dtype(travels_as) != full.dtype
        if rounded:
            full = device.empty(size, travels_as, Kind.STAGING)
            device.cast(slot.array[:size], full)
        self.bytes_reduced += full.nbytes // world * (world - 1)
        if self.ordered or rounded or out.size > collectives.COUNT_LIMIT:
            parts = device.empty(size, full.dtype, Kind.STAGING)
            return self.progress.start(Pending(
                collectives.all_to_all(self.comm, full, parts), out,
                then=lambda: device.ordered_sum(parts.reshape(world, -1), out, accumulate)))
        if not accumulate:
            return self.progress.start(Pending(collectives.reduce_scatter(self.comm, full, out), out))
        summed = device.empty(out.size, out.dtype, Kind.STAGING)
        return self.progress.start(Pending(
            collectives.reduce_scatter(self.comm, full, summed), out, then=lambda: device.add(out, summed)))


class ReplicaTransport(HostTransport):
    """Nothing is sharded: every rank holds all weights, and gradients are summed everywhere.

    ordered: the sum is made slice by slice in rank order (an all-to-all, a local sum, an all-gather) instead of by MPI.
    bytes_reduced counts what a ring all-reduce sends: 2 (world - 1) / world of the gradient.
    """

    name = "replicas"
    in_place = True

    def __init__(self, comm: MPI.Comm, device: Device, progress: Progress, ordered: bool = False) -> None:
        self.comm, self.device, self.progress, self.ordered = comm.Dup(), device, progress, ordered
        self.bytes_gathered = self.bytes_reduced = 0

    def gather(self, store: Store, slot: Slot | None) -> Pending:
        return self.progress.start(Pending(collectives.nothing(), store.local))

    def reduce(self, slot: Slot, size: int, out: Array, accumulate: bool, travels_as: Any = None) -> Pending:
        full, device, world = slot.array[:size], self.device, self.comm.size
        travels_as = full.dtype if travels_as is None else np.dtype(travels_as)
        rounded = travels_as != full.dtype
        share = -(-size // world)  # the sum is made in equal shares; the last ones may reach into padding
        self.bytes_reduced += 2 * (world - 1) * (size * travels_as.itemsize // world)
        summed = device.empty(share * world, full.dtype, Kind.STAGING)
        if self.ordered or rounded:
            send = device.zeros(share * world, travels_as, Kind.STAGING)
            device.cast(full, send[:size])
            parts = device.empty(share * world, travels_as, Kind.STAGING)
            operation = self._sum_in_shares(send, parts, summed)
        else:
            operation = collectives.sum_everywhere(self.comm, full, summed[:size])

        def then() -> None:
            device.add(out, summed[:size]) if accumulate else device.cast(summed[:size], out)

        return self.progress.start(Pending(operation, out, then), lane="reduce")

    def _sum_in_shares(self, send: Array, parts: Array, summed: Array) -> Operation:
        yield from collectives.all_to_all(self.comm, send, parts)
        own = self.device.empty(parts.size // self.comm.size, summed.dtype, Kind.STAGING)
        self.device.ordered_sum(parts.reshape(self.comm.size, -1), own, False)
        yield from collectives.all_gather(self.comm, own, summed)
