"""`mpshard` in which one rank is killed in the middle of a save: killed_rank.py VICTIM SAVE HOW LIMIT COMMAND ...

The victim dies in its SAVE-th save (from 1), HOW = "event": before the LIMIT-th call or return of a function, Python's or
a library's; "timer": after LIMIT seconds, wherever it is then, in a system call or in MPI. HOW = "count" kills nobody and
prints how many events the first save of each rank had and how long it took, for drawing limits.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from typing import Any


def main(victim: int, number: int, how: str, limit: float, command: list[str]) -> None:
    from mpshard.checkpoint import save
    from mpshard.cli import main
    from mpshard.comm import world

    saves, write = itertools.count(1), save.write

    def watched(comm: Any, root: Any, content: Any, *rest: Any) -> Any:
        this = next(saves)
        if how == "count" and this == number:
            return counted(lambda: write(comm, root, content, *rest))
        if how != "count" and world.rank == victim and this == number:
            sys.stderr.write(f"KILLED IN SAVE OF STEP {content.state.step}\n")
            sys.stderr.flush()
            arm()
        return write(comm, root, content, *rest)

    def counted(action: Any) -> Any:
        events = itertools.count()
        start = time.perf_counter()
        sys.setprofile(lambda *event: next(events))
        try:
            return action()
        finally:
            sys.setprofile(None)
            sys.stderr.write(f"EVENTS {next(events)} SECONDS {time.perf_counter() - start}\n")

    def arm() -> None:
        if how == "timer":
            # Without a handler the kernel ends the process where it is.
            signal.setitimer(signal.ITIMER_REAL, max(limit, 1e-6))
            return
        events = itertools.count()
        sys.setprofile(lambda *event: next(events) >= limit and os.kill(os.getpid(), signal.SIGKILL))

    save.write = watched
    main(command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5:])
