"""Is everybody here? Before an operation that would wait for ever for a rank that does not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpi4py import MPI

PATIENCE = 10.0  # seconds
_LISTENING = 1.0  # seconds that those who came exchange their names
_TAG = 4711


def roll_call(comm: MPI.Comm, what: str, patience: float | None = None) -> None:
    """Wait until every rank of `comm` has called this, `patience` (PATIENCE) seconds at most. Collective.

    What else uses `comm` must not be under way at the same time.

    Raises
    ------
    RuntimeError : on the ranks that came; it names those that did not. `what`: the function that all must call.
    """
    patience = PATIENCE if patience is None else patience
    barrier = comm.Ibarrier()
    if _within(patience, barrier):
        return
    present = {comm.rank}
    sends = [comm.isend(comm.rank, dest, _TAG) for dest in range(comm.size) if dest != comm.rank]

    def listen() -> None:
        while comm.iprobe(tag=_TAG):
            present.add(comm.recv(tag=_TAG))

    if _within(_LISTENING, barrier, listen):  # the last came while we asked
        MPI.Request.waitall(sends)
        return
    here, absent = sorted(present), sorted(set(range(comm.size)) - present)
    raise RuntimeError(f"{what} was called on {_ranks(here)} only; {_ranks(absent)} did not call it within "
                       f"{patience:g} s: every rank must")


def _within(seconds: float, request: MPI.Request, meanwhile: Callable[[], None] | None = None) -> bool:
    end, pause = time.monotonic() + seconds, 0.0
    while not request.Test():
        if meanwhile is not None:
            meanwhile()
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause + 1e-4, 0.01)
    return True


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
