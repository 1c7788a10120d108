"""One time for all ranks, so that their traces can be laid over each other."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpi4py import MPI


def clock_offset(comm: MPI.Comm, tries: int = 16, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """What to add to this rank's clock to get rank 0's, and the round trip it was measured with, in seconds.

    Each rank in turn asks rank 0 for the time and takes the quickest of `tries` answers: its error is at most half
    of that round trip (Cristian 1989, "Probabilistic clock synchronization"). Collective; (0, 0) on rank 0.
    """
    best = (0.0, 0.0) if comm.rank == 0 else (float("inf"), 0.0)
    for asking in range(1, comm.size):
        for _ in range(tries):
            if comm.rank == 0:
                comm.recv(source=asking)
                comm.send(clock(), dest=asking)
            elif comm.rank == asking:
                asked = clock()
                comm.send(None, dest=0)
                theirs = comm.recv(source=0)
                answered = clock()
                best = min(best, (answered - asked, theirs - (asked + answered) / 2))
    round_trip, offset = best
    return offset, round_trip
