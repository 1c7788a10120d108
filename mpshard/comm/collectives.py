"""Collectives that own their buffers, and who makes them progress.

An operation is a generator: it yields what it waits for, a request of MPI or a condition, and goes on when that
is there. So one text serves both ways of making progress, and an operation may have several stages.

Note on progress. A nonblocking call is not overlapped by itself: somebody must be inside MPI. Measured over a
400 Mbit/s link with the host busy in matrix products: nonblocking then Wait hides nothing; Test between
kernels 90 %; one thread that runs the operations in their order 94 %. With every core computing, the thread
only takes turns with the compute, so `Thread` is the choice when a rank has more than one core. With one it is `Poll` inside a
node; between nodes a link would stand still during long kernels, once the system's buffers are empty, so `Timer` looks after it
every few milliseconds.

Note on counts. MPI-4 gives counts of 64 bits, but Open MPI 5.0 still refuses 2^31 elements in one call. Above
`COUNT_LIMIT` elements are sent in larger units (a contiguous datatype); reductions cannot be (their operators want
predefined types), so they are done as an all-to-all and a local sum.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpshard.config import ConfigError
from mpshard.device.base import Array

COUNT_LIMIT = 2**31 - 1  # elements a rank in one call

Awaited = MPI.Request | Callable[[], bool]
Operation = Generator[Awaited, None, None]

_under_way: set[Pending] = set()  # keeps those of a step that was given up, too: MPI goes on writing into their buffers


class Pending:
    """A communication under way. It owns its request and its buffers: nothing can be reused or collected too early.

    result: what `wait` returns, the array that is complete then.
    then: local work that completes the operation (a sum, an addition), run by `wait` on the caller's thread.
    """

    def __init__(self, operation: Operation, result: Array, then: Callable[[], None] | None = None) -> None:
        self.operation, self.result, self.then = operation, result, then
        self.started, self.finished = time.perf_counter(), 0.0
        self.error: BaseException | None = None
        self.progress: Progress  # set where it is started
        self._awaited: Awaited | None = None
        _under_way.add(self)

    def advance(self, block: bool = False) -> bool:
        """Run the operation as far as it goes; with `block` to its end. True once it has ended."""
        while not self.finished:
            if self._awaited is not None and not _ready(self._awaited, block):
                return False
            try:
                self._awaited = next(self.operation)
            except StopIteration:
                self._awaited, self.finished = None, time.perf_counter()
                _under_way.discard(self)
        return True

    def wait(self) -> Array:
        """Block until complete, do the local rest, return the result."""
        self.progress.wait(self)
        if self.error is not None:
            raise self.error
        if self.then is not None:
            self.then()
            self.then = None
        return self.result

    def afterwards(self, work: Callable[[], None]) -> Pending:
        """Let `wait` also do this, last."""
        first = self.then

        def both() -> None:
            if first is not None:
                first()
            work()

        self.then = both
        return self

    @property
    def seconds(self) -> float:
        """Time in flight: from the start to the moment completion was seen."""
        return (self.finished or time.perf_counter()) - self.started


def _ready(awaited: Awaited, block: bool) -> bool:
    if isinstance(awaited, MPI.Request):
        if block:
            awaited.Wait()
            return True
        return awaited.Test()
    if block:
        wait_until(awaited)
        return True
    return awaited()


def wait_until(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Ask again and again: at once at first, then yielding the core, then with naps, for ranks may outnumber cores."""
    tries = 0
    while not condition():
        meanwhile()
        tries += 1
        if tries > 1000:
            time.sleep(50e-6)
        elif tries > 20:
            time.sleep(0)


class Poll:
    """Progress between kernels: `poll` advances what is under way.

    Operations of one lane run one after another, for those that make MPI calls at a later stage: their order must be
    the same on all ranks. Operations without a lane make their call at once.
    """

    name = "poll"

    def __init__(self) -> None:
        self.outstanding: list[Pending] = []
        self.lanes: dict[str, list[Pending]] = {}

    def start(self, pending: Pending, lane: str | None = None) -> Pending:
        pending.progress = self
        if lane is None:
            if not pending.advance():
                self.outstanding.append(pending)
        else:
            self.lanes.setdefault(lane, []).append(pending)
            self.poll()
        return pending

    @property
    def under_way(self) -> bool:
        return bool(self.outstanding or any(self.lanes.values()))

    def poll(self) -> None:
        if self.outstanding:
            self.outstanding = [pending for pending in self.outstanding if not pending.advance()]
        for line in self.lanes.values():
            while line and line[0].advance():
                del line[0]

    def wait(self, pending: Pending) -> None:
        if not pending.finished:
            wait_until(lambda: bool(pending.finished), meanwhile=self.poll)

    def close(self) -> None:
        pass


class Timer(Poll):
    """As `Poll`, and every `INTERVAL` seconds while anything is under way, from a thread that sleeps in between.

    Kernels leave Python's lock while they compute, so it gets its turn on a core that is busy with one. Needs
    MPI.THREAD_MULTIPLE, since the main thread may be inside a call of its own.
    """

    name = "timer"
    INTERVAL = 2e-3

    def __init__(self) -> None:
        super().__init__()
        _need_threads(self.name)
        self.lock = threading.RLock()
        self.busy, self.closing = threading.Event(), False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="mpshard-timer", daemon=True)
        self.thread.start()

    def start(self, pending: Pending, lane: str | None = None) -> Pending:
        with self.lock:
            super().start(pending, lane)
            if self.under_way:
                self.busy.set()
        return pending

    def poll(self) -> None:
        with self.lock:
            if self.error is not None:
                raise self.error
            super().poll()
            if not self.under_way:
                self.busy.clear()

    def _run(self) -> None:
        while not self.closing:
            self.busy.wait()
            time.sleep(self.INTERVAL)
            try:
                self.poll()
            except BaseException as error:  # for the main thread, at its next call: it must not die unseen in this one
                self.error = self.error or error
                return

    def close(self) -> None:
        self.closing = True
        self.busy.set()
        self.thread.join()


class Thread:
    """Progress on a thread of its own, which runs the operations to their ends in the order of their starts.

    Needs MPI.THREAD_MULTIPLE, since the main thread goes on making its own calls on another communicator.
    """

    name = "thread"

    def __init__(self) -> None:
        _need_threads(self.name)
        self.jobs: queue.SimpleQueue[tuple[Pending, threading.Event] | None] = queue.SimpleQueue()
        self.events: dict[Pending, threading.Event] = {}
        self.thread = threading.Thread(target=self._run, name="mpshard-comm", daemon=True)
        self.thread.start()

    def start(self, pending: Pending, lane: str | None = None) -> Pending:
        pending.progress = self
        event = self.events[pending] = threading.Event()
        self.jobs.put((pending, event))
        return pending

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            pending, event = job
            try:
                pending.advance(block=True)
            except BaseException as error:  # handed to whoever waits: it must not die unseen in this thread
                pending.error = error
            event.set()
            del job, pending, event

    def poll(self) -> None:
        pass

    def wait(self, pending: Pending) -> None:
        self.events.pop(pending).wait()

    def close(self) -> None:
        self.jobs.put(None)
        self.thread.join()


def _need_threads(choice: str) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(f"shard.progress={choice} needs an MPI with MPI_THREAD_MULTIPLE; use shard.progress=poll")


Progress = Poll | Thread


def progress_for(choice: str, cores: int, world: int, node: int) -> Progress:
    """`choice` "poll", "timer" or "thread"; "auto": see `best_progress`. world, node: ranks in all, and on this node."""
    chosen = best_progress(cores, world, node, MPI.Query_thread() >= MPI.THREAD_MULTIPLE) if choice == "auto" else choice
    kinds: dict[str, Callable[[], Progress]] = {"poll": Poll, "timer": Timer, "thread": Thread}
    if chosen not in kinds:
        raise ConfigError(f'shard.progress={choice!r} is not known; use "auto", "poll", "timer" or "thread"')
    return kinds[chosen]()


def best_progress(cores: int, world: int, node: int, threads: bool) -> str:
    """The thread where the rank has a core for it and somebody to talk to, the timer where those are elsewhere. threads: whether
    MPI allows for any."""
    if world == 1 or not threads:
        return "poll"
    return "thread" if cores > 1 else "timer" if node < world else "poll"


# -- the operations --------------------------------------------------------------------------
def message(array: Array, blocks: int = 1) -> list[Any]:
    """An mpi4py buffer specification of a flat array, `blocks` equal parts; counts stay below COUNT_LIMIT.

    16-bit types that MPI does not know (bfloat16) travel as unsigned words: only their bits move.
    """
    array = _words(array)
    datatype = MPI.Datatype.fromcode(array.dtype.char)
    count = array.size // blocks
    unit = 1
    while count // unit > COUNT_LIMIT:
        unit *= 2
    if count % unit:
        raise ValueError(f"{count} elements a rank cannot be sent in units of {unit}; raise the layout's alignment")
    if unit > 1:
        datatype = datatype.Create_contiguous(unit).Commit()
    return [array, count // unit, datatype]


def _words(array: Array) -> Array:
    """The array, or its bits as unsigned words where MPI does not know its type."""
    return array if array.dtype.kind in "iuf" else array.view(np.dtype(f"u{array.dtype.itemsize}"))


def all_gather(comm: MPI.Comm, shard: Array, full: Array) -> Operation:
    """Every rank's slice (m,) into full (world * m,), in rank order. MPI-4.1, section 6.7."""
    yield comm.Iallgather(message(shard), message(full, comm.size))


def reduce_scatter(comm: MPI.Comm, full: Array, out: Array) -> Operation:
    """The sum over ranks of full (world * m,), slice r to rank r's out (m,), in an order MPI chooses. Section 6.10."""
    yield comm.Ireduce_scatter_block(full, out, op=MPI.SUM)


def all_to_all(comm: MPI.Comm, send: Array, recv: Array) -> Operation:
    """Slice r of send (world * m,) to rank r; recv (world * m,) holds what came from each rank, in order. Section 6.8."""
    yield comm.Ialltoall(message(send, comm.size), message(recv, comm.size))


def all_to_all_uneven(comm: MPI.Comm, send: Array, sizes: Sequence[int], recv: Array, came: Sequence[int]) -> Operation:
    """The next sizes[r] elements of send to rank r; of recv (sum of `came`) the next came[r] came from rank r. Section 6.8."""
    send, recv = _words(send), _words(recv)
    datatype = MPI.Datatype.fromcode(send.dtype.char)
    yield comm.Ialltoallv([send, list(sizes), datatype], [recv, list(came), datatype])


def sum_everywhere(comm: MPI.Comm, send: Array, recv: Array) -> Operation:
    """The sum over ranks of send (n,) to recv (n,) on every rank, in an order MPI chooses. Section 6.9.1."""
    yield comm.Iallreduce(send, recv, op=MPI.SUM)


def nothing() -> Operation:
    """Complete at once."""
    return
    yield  # makes it a generator


def all_reduce(comm: MPI.Comm, values: np.ndarray) -> np.ndarray:
    """The element-wise sum over ranks of a small host array; blocking. Every rank gets the same bits."""
    out = np.empty_like(values)
    comm.Allreduce(values, out, op=MPI.SUM)
    return out


def all_max(comm: MPI.Comm, values: np.ndarray) -> np.ndarray:
    """The element-wise maximum over ranks of a small host array; blocking."""
    out = np.empty_like(values)
    comm.Allreduce(values, out, op=MPI.MAX)
    return out


def exchange(comm: MPI.Comm, send: np.ndarray, send_counts: Sequence[int], recv_counts: Sequence[int]) -> np.ndarray:
    """Uneven parts of a flat host array to every rank: send_counts[r] elements, end to end, to rank r; returns what came,
    recv_counts[r] elements from rank r, end to end. Blocking. Section 6.8."""
    out = np.empty(sum(recv_counts), send.dtype)
    comm.Alltoallv([send, list(send_counts), MPI.Datatype.fromcode(send.dtype.char)],
                   [out, list(recv_counts), MPI.Datatype.fromcode(send.dtype.char)])
    return out


def all_gather_uneven(comm: MPI.Comm, send: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Every rank's flat host array, end to end; counts[r]: rank r's elements. Blocking. Section 6.7."""
    out = np.empty(sum(counts), send.dtype)
    comm.Allgatherv(send, [out, list(counts), MPI.Datatype.fromcode(send.dtype.char)])
    return out


def gather_all(comm: MPI.Comm, values: np.ndarray) -> np.ndarray:
    """Every rank's small host array (k,) as (world, k), on every rank; blocking."""
    out = np.empty((comm.size, values.size), values.dtype)
    comm.Allgather(values, out)
    return out
