"""How units travel from and to devices: straight from their memory, or through pinned memory of the host.

Note on order. MPI knows nothing of streams: it reads and writes memory at once, whatever the device has still to do
there. So every buffer carries the event after which its last user on the device is done: the update of a slice, the
last kernel that read a gathered unit, the last that wrote a gradient. That event is seen to be done before the call of
MPI, or the copy, that touches the buffer. In the other direction the host waits for MPI anyway, and copies to the device
end in an event that its arithmetic waits for.

Note on reductions. Gradients always travel by an all-to-all and are added up by a kernel in rank order. A nonblocking
reduction of MPI on device memory is not to be had: Open MPI's dereferences it on the host (open-mpi/ompi#9845).

Note on memory. Buffers that MPI sees are made once and used again: registering memory costs more than a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpshard.comm import collectives
from mpshard.comm.collectives import Operation, Pending, Progress
from mpshard.comm.cuda_probe import Verdict, probe
from mpshard.comm.transport import Slot, Store
from mpshard.config import ConfigError
from mpshard.device.base import Accelerator, Array, Event, Kind

CHUNK = 16 << 20  # bytes of a pinned buffer; two each to send and to receive


class DeviceStore(Store):
    """A slice on the device. event: its last update."""

    def __init__(self, local: Array, device: Accelerator) -> None:
        super().__init__(local)
        self.device = device
        self.event = device.record()

    def written(self) -> None:
        self.event = self.device.record()


class DeviceSlot(Slot):
    """A buffer on the device. event: the last that was done with it there."""

    def __init__(self, array: Array, device: Accelerator) -> None:
        super().__init__(array)
        self.device = device
        self.event = device.record()

    def written(self) -> None:
        self.event = self.device.record()


class DeviceTransport:
    """A CUDA-aware MPI is given device memory. See `mpshard.comm.transport.Transport`.

    Gathers and reduces start when the device has come so far, which is not the same moment on every rank; so each kind
    has a communicator of its own and keeps its own order.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm, device: Accelerator, progress: Progress) -> None:
        self.comm, self.world, self.device, self.progress = comm, comm.size, device, progress
        self.gathers, self.reduces = comm.Dup(), comm.Dup()
        self.in_place = self.world == 1
        self.bytes_gathered = self.bytes_reduced = 0
        self.parts: list[DeviceSlot] = []  # what came from all ranks, until it is added up; those not in use

    def store(self, size: int, dtype: Any, kind: Kind) -> Store:
        return DeviceStore(self.device.zeros(size, dtype, kind), self.device)

    def slot(self, size: int, dtype: Any, kind: Kind) -> Slot:
        return DeviceSlot(self.device.empty(size, dtype, kind), self.device)

    def among(self, comm: MPI.Comm) -> DeviceTransport:
        return type(self)(comm, self.device, self.progress)

    def holding(self, array: Array) -> Slot:
        return DeviceSlot(array, self.device)

    # -- gather ------------------------------------------------------------------------------
    def gather(self, store: DeviceStore, slot: DeviceSlot | None) -> Pending:
        if slot is None:
            return self.progress.start(Pending(collectives.nothing(), store.local))
        full = slot.array[: store.local.size * self.world]
        self.bytes_gathered += full.nbytes - store.local.nbytes
        arrived: list[Event] = []
        operation = self._gather(store.local, store.event, full, slot.event, arrived)
        return self.progress.start(Pending(operation, full, self._wait_for(arrived)), lane="gather")

    def _gather(self, local: Array, updated: Event, full: Array, read: Event, arrived: list[Event]) -> Operation:
        yield _done(updated)
        yield _done(read)
        yield from collectives.all_gather(self.gathers, local, full)

    def release(self, slot: DeviceSlot | None) -> None:
        if slot is not None:
            slot.written()

    # -- reduce ------------------------------------------------------------------------------
    def reduce(self, slot: DeviceSlot, size: int, out: Array, accumulate: bool, travels_as: Any = None) -> Pending:
        full = slot.array[:size]
        if travels_as is not None and np.dtype(travels_as) != full.dtype:
            raise TypeError(f"gradients on a device are kept as they travel, in {np.dtype(travels_as)}, not {full.dtype}")
        if self.world == 1:
            return self.progress.start(Pending(
                collectives.nothing(), out, lambda: self.device.ordered_sum(full.reshape(1, -1), out, accumulate)))
        self.bytes_reduced += full.nbytes // self.world * (self.world - 1)
        parts = self._take(size, full.dtype)
        received = parts.array[:size]
        arrived: list[Event] = []

        def add_up() -> None:
            self._wait_for(arrived)()
            self.device.ordered_sum(received.reshape(self.world, -1), out, accumulate)
            parts.written()
            self.parts.append(parts)

        operation = self._exchange(full, slot.event, received, parts.event, arrived)
        return self.progress.start(Pending(operation, out, add_up), lane="reduce")

    def _exchange(self, full: Array, written: Event, received: Array, added: Event, arrived: list[Event]) -> Operation:
        yield _done(written)
        yield _done(added)
        yield from collectives.all_to_all(self.reduces, full, received)

    def _take(self, size: int, dtype: np.dtype[Any]) -> DeviceSlot:
        """A buffer for what comes from all ranks: a free one, or one more. Between steps all are free."""
        for place, slot in enumerate(self.parts):
            if slot.array.dtype == dtype and slot.array.size >= size:
                return self.parts.pop(place)
        if self.parts:  # too small: grow it
            self.parts.pop()
        return DeviceSlot(self.device.empty(size, dtype, Kind.STAGING), self.device)

    def _wait_for(self, arrived: Sequence[Event]) -> Callable[[], None]:
        """Arithmetic from then on runs after the copies that have been started."""
        def wait() -> None:
            for event in arrived:
                self.device.wait(event)

        return wait


class DeviceReplicas:
    """Nothing is sharded, see `mpshard.comm.transport.ReplicaTransport`: gradients are summed everywhere, each rank one share.

    messages: how they travel.
    """

    name = "replicas"
    in_place = True

    def __init__(self, messages: DeviceTransport) -> None:
        self.messages, self.comm, self.world = messages, messages.comm, messages.world
        self.device, self.progress = messages.device, messages.progress
        self.store, self.slot, self.among, self.holding = messages.store, messages.slot, messages.among, messages.holding
        self.bytes_gathered = self.bytes_reduced = 0

    def gather(self, store: DeviceStore, slot: DeviceSlot | None) -> Pending:
        return self.progress.start(Pending(collectives.nothing(), store.local))

    def release(self, slot: DeviceSlot | None) -> None:
        pass

    def reduce(self, slot: DeviceSlot, size: int, out: Array, accumulate: bool, travels_as: Any = None) -> Pending:
        if self.world == 1:
            return self.messages.reduce(slot, size, out, accumulate, travels_as)
        full, device, share = slot.array[:size], self.device, -(-size // self.world)
        self.bytes_reduced += 2 * (self.world - 1) * (full.nbytes // self.world)
        summed = device.empty(share * self.world, out.dtype, Kind.STAGING)
        arrived: list[Event] = []

        def take() -> None:
            self.messages._wait_for(arrived)()
            device.add(out, summed[:size]) if accumulate else device.cast(summed[:size], out)

        return self.progress.start(Pending(self._sum_in_shares(full, share, summed, arrived), out, take), lane="reduce")

    def _sum_in_shares(self, full: Array, share: int, summed: Array, arrived: list[Event]) -> Operation:
        device, messages = self.device, self.messages
        came: list[Event] = []
        send, parts = (device.zeros(share * self.world, full.dtype, Kind.STAGING) for _ in range(2))
        own = device.empty(share, summed.dtype, Kind.STAGING)
        device.cast(full, send[: full.size])
        written = device.record()  # and nobody uses what the others have held before
        yield from messages._exchange(send, written, parts, written, came)
        messages._wait_for(came)()
        device.ordered_sum(parts.reshape(self.world, -1), own, False)
        yield from messages._gather(own, device.record(), summed, written, arrived)


class _Pinned:
    """Two pairs of pinned buffers, used in turn."""

    def __init__(self, device: Accelerator) -> None:
        self.send = [device.pinned(CHUNK) for _ in range(2)]
        self.receive = [device.pinned(CHUNK) for _ in range(2)]


class StagedTransport(DeviceTransport):
    """Any MPI: slices pass through pinned memory in chunks.

    While MPI moves one chunk the device copies the next one out and the last one in.
    """

    name = "staged"

    def __init__(self, comm: MPI.Comm, device: Accelerator, progress: Progress) -> None:
        super().__init__(comm, device, progress)
        if self.world > 1:
            self.of_gathers, self.of_reduces = _Pinned(device), _Pinned(device)

    def _gather(self, local: Array, updated: Event, full: Array, read: Event, arrived: list[Event]) -> Operation:
        def copy_out(start: int, stop: int, host: Array) -> Event:
            return self.device.download(local[start:stop], host[: stop - start], after=[updated])

        whole = full.reshape(self.world, -1)
        yield from self._in_chunks(self.of_gathers, local, copy_out, self.gathers.Iallgather, whole, read, arrived, sent=1)

    def _exchange(self, full: Array, written: Event, received: Array, added: Event, arrived: list[Event]) -> Operation:
        slices = full.reshape(self.world, -1)

        def copy_out(start: int, stop: int, host: Array) -> Event:
            for rank, of_rank in enumerate(host[: self.world * (stop - start)].reshape(self.world, -1)):
                event = self.device.download(slices[rank, start:stop], of_rank, after=[written])
            return event

        rows = received.reshape(self.world, -1)
        yield from self._in_chunks(self.of_reduces, slices[0], copy_out, self.reduces.Ialltoall, rows, added, arrived,
                                   sent=self.world)

    def _in_chunks(self, pinned: _Pinned, one: Array, copy_out: Callable[[int, int, Array], Event], call: Callable[..., MPI.Request],
                   rows: Array, free: Event, arrived: list[Event], sent: int) -> Operation:
        """The two collectives, chunk by chunk of a slice `one`.

        copy_out(start, stop, host): start copying that part of what is sent, `sent` slices of it. rows (world, m): where
        what comes from each rank belongs, once `free` is done. arrived: gets the last copy's event.
        """
        m, dtype = one.size, one.dtype
        step = max(1, CHUNK // (dtype.itemsize * self.world))
        chunks = [(start, min(start + step, m)) for start in range(0, m, step)]
        send, receive = ([buffer.view(dtype) for buffer in buffers] for buffers in (pinned.send, pinned.receive))
        copied = copy_out(*chunks[0], send[0])
        for number, (start, stop) in enumerate(chunks):
            turn, count = number % 2, stop - start
            yield _done(copied)  # and so are the copies issued before, the last one from receive[turn] among them
            request = call(collectives.message(send[turn][: sent * count], sent),
                           collectives.message(receive[turn][: self.world * count], self.world))
            if number + 1 < len(chunks):
                copied = copy_out(*chunks[number + 1], send[1 - turn])  # the last message from there is complete
            yield request
            for row, came in zip(rows, receive[turn][: self.world * count].reshape(self.world, -1), strict=True):
                last = self.device.upload(came, row[start:stop], after=[free])
        arrived.append(last)


def _done(event: Event) -> Callable[[], bool]:
    return lambda: event.done


def device_transport(comm: MPI.Comm, device: Accelerator, progress: Progress, choice: str = "auto",
                     cuda_aware: str = "auto", group: MPI.Comm | None = None) -> DeviceTransport:
    """The transport for ranks whose units lie on devices. Collective over `comm`, all ranks.

    choice: "mpi", "staged" or "auto", which is mpi where MPI takes device memory. cuda_aware: "yes", "no", or "auto": find
    out, on the first rank, in processes of their own (some seconds). group: the ranks of `comm` that gather a unit; None: all.

    Raises ConfigError, on every rank, for mpi where MPI does not take device memory.
    """
    group = comm if group is None else group
    if comm.size == 1 or choice == "staged":
        return (DeviceTransport if comm.size == 1 else StagedTransport)(group, device, progress)
    verdict = Verdict(cuda_aware == "yes", f"run.cuda_aware={cuda_aware}")
    if cuda_aware == "auto":
        verdict = comm.bcast(probe() if comm.rank == 0 else None)
    if choice == "mpi" and not verdict.aware:
        raise ConfigError(f"shard.transport=mpi cannot be used with run.device=cupy: {verdict.why}; use shard.transport=staged")
    return (DeviceTransport if verdict.aware else StagedTransport)(group, device, progress)
