"""`mpshard` in which one rank is killed in the middle of a save: killed_rank.py VICTIM SAVE HOW LIMIT COMMAND ...

The victim dies in its SAVE-th save (from 1), HOW = "event": before the LIMIT-th call or return of a function, Python's or
a library's, in any thread; "timer": after LIMIT seconds, wherever it is then, in a system call or in MPI. A save that is
written behind the steps ends when the next one begins. HOW = "count" kills nobody and prints how many events the SAVE-th
save of each rank had and how long it took, for drawing limits.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from typing import Any


def main(victim: int, number: int, how: str, limit: float, command: list[str]) -> None:
    from mpshard.checkpoint.saver import Saver
    from mpshard.cli import main
    from mpshard.comm import world

    saves, save = itertools.count(1), Saver.save

    def watched(saver: Saver, step: int, position: int) -> None:
        saver.wait()
        this = next(saves)
        if how == "count" and this == number + 1:
            stop_counting()
        if this == number and (how == "count" or (how != "none" and world.rank == victim)):
            begin(step)
        save(saver, step, position)
        if how == "count" and this == number and saver.behind is None:
            stop_counting()

    events, started = itertools.count(), 0.0

    def begin(step: int) -> None:
        nonlocal started
        started = time.perf_counter()
        if how != "count":
            sys.stderr.write(f"KILLED IN SAVE OF STEP {step}\n")
            sys.stderr.flush()
        if how == "timer":  # without a handler the kernel ends the process where it is
            signal.setitimer(signal.ITIMER_REAL, max(limit, 1e-6))
        else:
            threading.setprofile(event)
            sys.setprofile(event)

    def event(*_: Any) -> None:
        if next(events) >= limit and how == "event":
            os.kill(os.getpid(), signal.SIGKILL)

    def stop_counting() -> None:
        if sys.getprofile() is not None:
            sys.setprofile(None)
            sys.stderr.write(f"EVENTS {next(events)} SECONDS {time.perf_counter() - started}\n")

    Saver.save = watched
    main(command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5:])
