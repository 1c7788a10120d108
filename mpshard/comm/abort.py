"""One rank's failure ends the job everywhere, with that rank's traceback.

MPI by itself does the opposite: a rank that raises, or leaves early, keeps the others waiting for ever (measured
under both libraries' launchers). So an uncaught exception in any thread prints and calls Abort.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType

from mpi4py import MPI


def install(comm: MPI.Comm) -> None:
    """From now on an uncaught exception on this rank, in any thread, ends every rank of `comm` with status 1.

    With one rank there is nobody to wait: Python's own handling stays.
    """
    if comm.size == 1:
        return

    def abort(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        text = "interrupted\n" if interrupted else "".join(traceback.format_exception(kind, error, trace))
        # One write, so that lines of several failing ranks do not mix.
        sys.stderr.write("".join(f"[rank {comm.rank} of {comm.size}] {line}\n" for line in text.splitlines()))
        sys.stderr.flush()
        sys.stdout.flush()
        comm.Abort(130 if interrupted else 1)

    sys.excepthook = abort
    threading.excepthook = lambda args: abort(args.exc_type, args.exc_value, args.exc_traceback)
