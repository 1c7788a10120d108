"""One rank's failure ends the job everywhere, with that rank's traceback and a status that is not 0.

MPI by itself does the opposite. Measured under both libraries' launchers: a rank that raises, or calls sys.exit(0),
keeps the others waiting for ever; and a signal's handler, written in Python, does not run while the rank waits inside
MPI. So whatever leaves `guarded` early, in any thread or by a signal, prints why and calls MPI_Abort.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import NoReturn

from mpi4py import MPI

# Seconds that ranks other than 0 wait before they speak: when all ranks fail in the same way, or the user presses
# Ctrl-C, one of them has ended the job by then and the reason is printed once.
PATIENCE = 1.0
RELAYED = (signal.SIGTERM, signal.SIGUSR1)  # to handlers that others install
BROKEN_PIPE = 128 + 13  # the status that a shell gives to a program ended by SIGPIPE


@contextmanager
def guarded(comm: MPI.Comm) -> Iterator[None]:
    """Run a block that all ranks leave together; if this one leaves it in another way, all ranks of `comm` end.

    Statuses: 1 for an exception, 128 + number for SIGINT and SIGTERM, n for sys.exit(n), 1 for sys.exit(0).
    With one rank there is nobody to wait: exceptions in the main thread pass, and SIGINT is a KeyboardInterrupt.
    """
    threading.excepthook = lambda args: _thread_failed(comm, args)
    if comm.size > 1:
        _watch_signals(comm)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except BaseException as error:
        if comm.size == 1:
            raise
        end(comm, type(error), error, error.__traceback__)


def end(comm: MPI.Comm, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> NoReturn:
    """Print what went wrong on this rank and end the job."""
    lines = [] if issubclass(kind, BrokenPipeError) else traceback.format_exception(kind, error, trace)
    status = 1
    if issubclass(kind, KeyboardInterrupt):
        status, lines = 128 + signal.SIGINT, ["interrupted"]
    elif issubclass(kind, BrokenPipeError):  # whoever read our output (| head) has had enough
        status = BROKEN_PIPE
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) and error.code else 1
        lines.append("this rank left while the others were still at work")
    stop(comm, "".join(lines), status)


def stop(comm: MPI.Comm, text: str, status: int) -> NoReturn:
    """Say `text`, each line marked with this rank, and end the job with `status`."""
    if comm.rank != 0:
        time.sleep(PATIENCE)
    with suppress(OSError, ValueError):  # a closed stream must not keep the job from ending
        # One write, so that lines of several failing ranks do not mix.
        sys.stderr.write("".join(f"[rank {comm.rank} of {comm.size}] {line}\n" for line in text.splitlines()))
        sys.stderr.flush()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    signal.alarm(5)  # SIGALRM's default is death: in case that MPI_Abort itself hangs
    if comm.size > 1:
        comm.Abort(status)
    os._exit(status)


def leave_together(comm: MPI.Comm, seconds: float = 5.0) -> bool:
    """Whether all ranks come here within `seconds`. After False this rank is the only one, or one of a few, to leave."""
    request, limit = comm.Ibarrier(), time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > limit:
            return False
        time.sleep(0.001)
    return True


def _thread_failed(comm: MPI.Comm, args: threading.ExceptHookArgs) -> None:
    """A failed thread is a failed rank: nobody else would notice that its work is missing."""
    if args.exc_type is not SystemExit:
        end(comm, args.exc_type, args.exc_value, args.exc_traceback)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Python's own handler, but for destructors: an exception raised in one is dropped, and the interrupt would be lost.

    The pool's buffers are given back in a destructor, a hundred times a step: about one Ctrl-C in fifty fell into one.
    """
    caller = frame
    while caller is not None:  # whatever a destructor calls is in it, too
        if caller.f_code.co_name == "__del__":
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        caller = caller.f_back
    signal.default_int_handler(number, frame)


def _watch_signals(comm: MPI.Comm) -> None:
    """End the job on SIGINT and SIGTERM, also while the main thread waits inside MPI.

    Python's handlers run between two steps of the main thread, which may never come; but the number of the signal
    is written to a pipe at once, and a thread that waits for it runs.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    ending = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}

    def noted(number: int, frame: FrameType | None) -> None:
        """Nothing to do here: the thread sees it."""

    for number in ending:
        signal.signal(number, noted)

    def watch() -> None:
        while True:
            number = os.read(read, 1)[0]
            handler = signal.getsignal(number)
            if handler is noted:
                break
            if number in RELAYED and callable(handler):  # somebody else's now (mpshard.recover.preempt): tell him at once
                handler(number, None)
        if number == signal.SIGTERM:  # most often the launcher's, which is ending us and need not be told why
            time.sleep(2)
        stop(comm, ending[signal.Signals(number)], 128 + number)

    threading.Thread(target=watch, name="mpshard-signals", daemon=True).start()
