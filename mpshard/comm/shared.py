"""Ranks of one node share memory: a unit lies there once, and nobody copies what a neighbour can read.

Inside a node a message is a copy, and with every core computing a copy costs compute. So:

- On one node each slice is a part of a shared window in which the slices of a unit lie end to end. The full unit is
  always there; a gather only makes sure that every rank has finished its slice.
- On several nodes a slot is one buffer a node. Each rank puts its own slice there and fetches, over a communicator
  of the ranks with its number on every node, the slices of its counterparts: a unit enters a node once.
- Gradients are written to shared slots. Each rank sums its own slice over its neighbours' buffers, in rank order;
  on several nodes one slice for each counterpart, which they exchange and sum.

Note on synchronisation. Every rank runs the same program, so the n-th use of a slot or slice is the n-th everywhere
and counters suffice: each rank advances its own and waits until all have reached n. A counter is an aligned 8-byte
word with one writer; Win.Sync on both sides is the memory barrier (MPI-4.1, section 12.7: separate from the
compiler's freedom, Python has none). No message is sent and no rank waits for a rank that is ahead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpshard.comm import collectives
from mpshard.comm.collectives import Operation, Pending, Progress
from mpshard.comm.transport import HostTransport, Slot, Store
from mpshard.device.base import Array, Device, Kind

CHUNK = 64 << 20  # bytes of a window: windows are costly, so stores share them; untouched pages cost nothing
ALIGN = 4096  # bytes
BLOCK = 1 << 16  # elements
COUNTERS = 4096  # a rank: two a slot, one a store


class SharedMemory:
    """Memory that all ranks of a node see, carved from windows; and counters. Collective over `node`."""

    def __init__(self, node: MPI.Comm) -> None:
        self.node = node
        self.windows: list[MPI.Win] = []
        self.chunk, self.used = np.empty(0, np.uint8), 0
        self.counters = self.allocate(8 * COUNTERS * node.size).view(np.int64).reshape(node.size, COUNTERS)
        self.counters[node.rank] = 0
        self.n_counters = 0
        node.Barrier()

    def allocate(self, nbytes: int) -> np.ndarray:
        """`nbytes` bytes, the same memory on every rank of the node; uninitialised."""
        size = -(-nbytes // ALIGN) * ALIGN
        if self.used + size > self.chunk.size:
            whole = max(size, CHUNK)
            window = MPI.Win.Allocate_shared(whole if self.node.rank == 0 else 0, 1, comm=cast(MPI.Intracomm, self.node))
            window.Lock_all()  # Win.Sync wants an epoch
            self.windows.append(window)
            self.chunk, self.used = np.asarray(window.Shared_query(0)[0]), 0
        self.used += size
        return self.chunk[self.used - size:self.used - size + nbytes]

    def counter(self) -> Counter:
        """A new counter a rank, all 0."""
        self.n_counters += 1
        return Counter(self.counters[:, self.n_counters - 1], self.node.rank, self.windows[0])

    def free(self) -> None:
        """Give the windows back; collective, and nobody may touch the memory afterwards."""
        for window in self.windows:
            window.Unlock_all()
            window.Free()
        self.windows = []


class Counter:
    """One number a rank of the node; each rank advances its own."""

    def __init__(self, numbers: np.ndarray, rank: int, window: MPI.Win) -> None:
        self.numbers, self.rank, self.window, self.mine = numbers, rank, window, 0

    def advance(self) -> int:
        """Say that this rank has come one further (everything it wrote before is visible to who sees the number)."""
        self.mine += 1
        self.window.Sync()
        self.numbers[self.rank] = self.mine
        return self.mine

    def reached(self, number: int) -> Callable[[], bool]:
        """A condition: every rank's number is at least this."""
        def condition() -> bool:
            if min(self.numbers.tolist()) < number:  # of a few numbers faster than NumPy's
                return False
            self.window.Sync()
            return True

        return condition


class SharedStore(Store):
    """A slice in a shared window, where the whole unit `full` can be read."""

    def __init__(self, local: Array, full: Array, complete: Counter) -> None:
        super().__init__(local)
        self.full, self.complete = full, complete


class SharedSlot(Slot):
    """A shared buffer. ready: its content is complete; done: it has been read and may be overwritten.

    neighbours: for gradients the buffers of all ranks of the node, by node rank; for units there is one buffer a node.
    """

    private = False

    def __init__(self, array: Array, neighbours: list[Array], ready: Counter, done: Counter, progress: Progress) -> None:
        super().__init__(array)
        self.neighbours, self.ready, self.done, self.progress = neighbours, ready, done, progress

    def acquire(self) -> None:
        collectives.wait_until(self.done.reached(self.ready.mine), meanwhile=self.progress.poll)


class SharedTransport(HostTransport):
    """Shared memory inside a node, messages between the counterparts of several nodes.

    comm: all ranks, `ranks_on_node` of them consecutive on every node (see `fits`). Test several nodes on one by
    passing a smaller number.
    """

    name = "shm"

    def __init__(self, comm: MPI.Comm, ranks_on_node: int, device: Device, progress: Progress) -> None:
        self.comm, self.device, self.progress = comm.Dup(), device, progress
        index, self.local = divmod(comm.rank, ranks_on_node)
        self.node = comm.Split(index, comm.rank)
        # Gathers and reduces make their calls when a neighbour is ready, so each kind keeps its own order.
        self.gather_peers, self.reduce_peers = (comm.Split(self.local, comm.rank) for _ in range(2))
        self.nodes = self.gather_peers.size
        self.in_place = self.nodes == 1
        self.memory = SharedMemory(self.node)
        self.bytes_gathered = self.bytes_reduced = 0

    def _shared(self, size: int, dtype: Any) -> Array:
        return self.memory.allocate(size * np.dtype(dtype).itemsize).view(dtype)

    def store(self, size: int, dtype: Any, kind: Kind) -> Store:
        if not self.in_place:
            return Store(self.device.zeros(size, dtype, kind))
        full = self._shared(size * self.comm.size, dtype)
        local = full[self.comm.rank * size:(self.comm.rank + 1) * size]
        local.fill(0)  # by its owner: the first to touch a page has it near its cores
        self.device.memory.count(kind, local.nbytes)
        return SharedStore(local, full, self.memory.counter())

    def slot(self, size: int, dtype: Any, kind: Kind) -> Slot:
        buffers = self.node.size if kind is Kind.FULL_GRADIENT else 1
        neighbours = [self._shared(size, dtype) for _ in range(buffers)]
        mine = neighbours[self.local if buffers > 1 else 0]
        self.device.memory.count(kind, mine.nbytes if buffers > 1 else mine.nbytes // self.node.size)
        return SharedSlot(mine, neighbours, self.memory.counter(), self.memory.counter(), self.progress)

    # -- gather ------------------------------------------------------------------------------
    def gather(self, store: Store, slot: Slot | None) -> Pending:
        self.bytes_gathered += store.local.nbytes * (self.comm.size - 1)
        if isinstance(store, SharedStore):
            return self.progress.start(Pending(self._complete(store), store.full))
        assert isinstance(slot, SharedSlot)
        full = slot.array[: store.local.size * self.comm.size]
        return self.progress.start(Pending(self._collect(store.local, slot, full), full), lane="gather")

    def _complete(self, store: SharedStore) -> Operation:
        yield store.complete.reached(store.complete.advance())

    def _collect(self, local: Array, slot: SharedSlot, full: Array) -> Operation:
        yield slot.done.reached(slot.ready.mine)
        size = local.size
        full[self.comm.rank * size:(self.comm.rank + 1) * size] = local
        _, count, datatype = collectives.message(local)
        places = [(node * self.node.size + self.local) * count for node in range(self.nodes)]  # in datatypes, as count
        yield self.gather_peers.Iallgatherv(
            MPI.IN_PLACE, [collectives.message(full)[0], [count] * self.nodes, places, datatype])
        yield slot.ready.reached(slot.ready.advance())

    def release(self, slot: Slot | None) -> None:
        if isinstance(slot, SharedSlot):
            slot.done.advance()

    # -- reduce ------------------------------------------------------------------------------
    def reduce(self, slot: Slot, size: int, out: Array, accumulate: bool, travels_as: Any = None) -> Pending:
        assert isinstance(slot, SharedSlot)
        width = out.itemsize
        if travels_as is not None and np.dtype(travels_as) != slot.array.dtype:
            self._round(slot.array[:size], travels_as)
            width = np.dtype(travels_as).itemsize
        self.bytes_reduced += out.size * width * (self.comm.size - 1)
        step = self._sum_here if self.nodes == 1 else self._sum_across
        return self.progress.start(Pending(step(slot, out, accumulate), out), lane="reduce")

    def _round(self, values: Array, dtype: Any) -> None:
        """Round in place: nothing travels, but the sum must not depend on the transport."""
        for start in range(0, values.size, BLOCK):
            block = values[start:start + BLOCK]
            short = self.device.empty(block.size, dtype, Kind.STAGING)
            self.device.cast(block, short)
            self.device.cast(short, block)

    def _sum_here(self, slot: SharedSlot, out: Array, accumulate: bool) -> Operation:
        yield slot.ready.reached(slot.ready.advance())
        self._sum_slice(slot, self.comm.rank, out, accumulate)
        slot.done.advance()

    def _sum_across(self, slot: SharedSlot, out: Array, accumulate: bool) -> Operation:
        yield slot.ready.reached(slot.ready.advance())
        sums = self.device.empty((self.nodes, out.size), out.dtype, Kind.STAGING)
        for node in range(self.nodes):
            self._sum_slice(slot, node * self.node.size + self.local, sums[node], accumulate=False)
        slot.done.advance()
        parts = self.device.empty((self.nodes, out.size), out.dtype, Kind.STAGING)
        send, recv = (collectives.message(part.reshape(-1), self.nodes) for part in (sums, parts))
        yield self.reduce_peers.Ialltoall(send, recv)
        self.device.ordered_sum(parts, out, accumulate)

    def _sum_slice(self, slot: SharedSlot, rank: int, out: Array, accumulate: bool) -> None:
        """Slice `rank` of every neighbour's buffer, summed in their order, in blocks that stay in the cache."""
        first = rank * out.size
        self.device.ordered_sum([buffer[first:first + out.size] for buffer in slot.neighbours], out, accumulate)


def fits(comm: MPI.Comm, ranks_on_node: int, nbytes: int) -> str | None:
    """Why shared memory cannot carry the model among `comm`, or None if it can.

    ranks_on_node: as this rank sees it. nbytes: what a node must hold. Collective.
    """
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    first = comm.rank - comm.rank % ranks_on_node
    inside = shared.allgather(comm.rank)
    shared.Free()
    together = all(rank in inside for rank in range(first, first + ranks_on_node))
    sizes = comm.allgather((ranks_on_node, together))
    if len({size for size, _ in sizes}) > 1 or not all(good for _, good in sizes) or comm.size % ranks_on_node:
        return "nodes hold different numbers of ranks, or ranks are not consecutive on them"
    status = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    free = comm.allreduce(status.f_bavail * status.f_frsize if status else 0, op=MPI.MIN)
    if free < nbytes * 1.05 + CHUNK:
        return f"/dev/shm has {free >> 20} MiB free, {int(nbytes * 1.05 + CHUNK) >> 20} MiB are needed"
    return None
