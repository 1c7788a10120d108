"""Nonblocking collectives on flat arrays, and who makes them progress.

Note on progress. A nonblocking call is not overlapped by itself: somebody must be inside MPI. Measured over a
400 Mbit/s link with the host busy in matrix products: nonblocking then Wait hides nothing; Test between
kernels 90 %; one thread that runs the blocking calls in their order 94 %. With every core computing the thread
only takes turns with the compute, so `Poll` is the choice when a rank has one core and `Thread` when it has more.

Note on counts. MPI-4 gives counts of 64 bits, but Open MPI 5.0 still refuses 2^31 elements in one call. Above
`COUNT_LIMIT` elements are sent in larger units (a contiguous datatype); reductions cannot be (their operators want
predefined types), so they are done as an all-to-all and a local sum.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpshard.device.base import Array

COUNT_LIMIT = 2**31 - 1  # elements a rank in one call


class Pending:
    """A communication under way. It owns its request and its buffers: nothing can be reused or collected too early.

    result: what `wait` returns, the array that is complete then.
    then: local work that completes the operation (a sum, an addition), run by `wait` on the caller's thread.
    """

    def __init__(self, buffers: tuple[Array, ...], result: Array, then: Callable[[], None] | None = None) -> None:
        self.buffers, self.result, self.then = buffers, result, then
        self.started, self.finished = time.perf_counter(), None
        self.request: MPI.Request | None = None
        self.event: threading.Event | None = None
        self.error: BaseException | None = None

    def test(self) -> bool:
        """True once the data has arrived; for a polled operation this is also what moves it."""
        if self.finished is None and self.request is not None and self.request.Test():
            self.finished = time.perf_counter()
        return self.finished is not None

    def wait(self) -> Array:
        """Block until complete, do the local rest, return the result. The buffers are let go."""
        if self.event is not None:
            self.event.wait()
            if self.error is not None:
                raise self.error
        elif not self.test():
            self.request.Wait()
            self.finished = time.perf_counter()
        if self.then is not None:
            self.then()
        self.buffers, self.then = (), None
        return self.result

    @property
    def seconds(self) -> float:
        """Time in flight: from the start to the moment completion was seen."""
        return (self.finished or time.perf_counter()) - self.started


class Poll:
    """Progress between kernels: `poll` tests the operations under way, oldest first."""

    name = "poll"

    def __init__(self) -> None:
        self.outstanding: list[Pending] = []

    def start(self, pending: Pending, nonblocking: Callable[[], MPI.Request], blocking: Callable[[], None]) -> Pending:
        pending.request = nonblocking()
        self.outstanding.append(pending)
        return pending

    def poll(self) -> None:
        if self.outstanding:
            self.outstanding = [pending for pending in self.outstanding if not pending.test()]

    def close(self) -> None:
        pass


class Thread:
    """Progress on a thread of its own, which runs the blocking form of each operation in the order of their starts.

    Needs MPI.THREAD_MULTIPLE, since the main thread goes on making its own calls on another communicator.
    """

    name = "thread"

    def __init__(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("shard.progress=thread needs an MPI with MPI_THREAD_MULTIPLE; use shard.progress=poll")
        self.jobs: queue.SimpleQueue[tuple[Pending, Callable[[], None]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="mpshard-comm", daemon=True)
        self.thread.start()

    def start(self, pending: Pending, nonblocking: Callable[[], MPI.Request], blocking: Callable[[], None]) -> Pending:
        pending.event = threading.Event()
        self.jobs.put((pending, blocking))
        return pending

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            pending, blocking = job
            try:
                blocking()
            except BaseException as error:  # handed to whoever waits: it must not die unseen in this thread
                pending.error = error
            pending.finished = time.perf_counter()
            pending.event.set()
            del job, pending, blocking

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self.jobs.put(None)
        self.thread.join()


Progress = Poll | Thread


def progress_for(choice: str, cores: int, world: int) -> Progress:
    """`choice` "poll" or "thread"; "auto" takes the thread where the rank has a core for it and somebody to talk to."""
    if choice not in ("auto", "poll", "thread"):
        raise ValueError(f'progress={choice!r} is not known; use "auto", "poll" or "thread"')
    threaded = choice == "thread" or (choice == "auto" and cores > 1 and world > 1)
    return Thread() if threaded else Poll()


def message(array: Array, blocks: int = 1) -> list[Any]:
    """An mpi4py buffer specification of a flat array, `blocks` equal parts; counts stay below COUNT_LIMIT.

    16-bit types that MPI does not know (bfloat16) travel as unsigned words: only their bits move.
    """
    if array.dtype.kind not in "iuf":
        array = array.view(np.dtype(f"u{array.dtype.itemsize}"))
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


def all_gather(comm: MPI.Comm, progress: Progress, shard: Array, full: Array) -> Pending:
    """Every rank's slice (m,) into full (world * m,), in rank order. MPI-4.1, section 6.7."""
    send, recv = message(shard), message(full, comm.size)
    return progress.start(Pending((shard, full), full),
                          lambda: comm.Iallgather(send, recv), lambda: comm.Allgather(send, recv))


def reduce_scatter(comm: MPI.Comm, progress: Progress, full: Array, out: Array, then: Callable[[], None] | None = None) -> Pending:
    """The sum over ranks of full (world * m,), slice r to rank r's out (m,), in an order MPI chooses. Section 6.10."""
    return progress.start(Pending((full, out), out, then),
                          lambda: comm.Ireduce_scatter_block(full, out, op=MPI.SUM),
                          lambda: comm.Reduce_scatter_block(full, out, op=MPI.SUM))


def all_to_all(comm: MPI.Comm, progress: Progress, send: Array, recv: Array, then: Callable[[], None] | None = None) -> Pending:
    """Slice r of send (world * m,) to rank r; recv (world * m,) holds what came from each rank, in order. Section 6.8."""
    a, b = message(send, comm.size), message(recv, comm.size)
    return progress.start(Pending((send, recv), recv, then), lambda: comm.Ialltoall(a, b), lambda: comm.Alltoall(a, b))


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
