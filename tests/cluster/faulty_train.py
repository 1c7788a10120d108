"""`python faulty_train.py HOW RANK STEP ARGUMENTS...`: `mpshard ARGUMENTS`, in which one rank fails after STEP steps.

Run by `test_failures.py` on every rank. The fault is put into the running program from outside: the package has no hook
for it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpshard import cli, launcher


def boom() -> None:
    raise ValueError("boom")


def out_of_memory() -> None:
    """A real one: the process may not take another gigabyte."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    np.ones(1 << 27)


def the_launcher() -> int:
    """The uppermost launcher among this process's ancestors."""
    found, pid = 0, os.getppid()
    while pid > 1:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        if before.partition("(")[2].startswith(("mpiexec", "mpirun", "prterun", "hydra", "srun")):
            found = pid
        pid = int(after.split()[1])
    return found


def wait() -> None:
    time.sleep(3600)


MAIN: dict[str, Callable[[], None]] = {
    "raise": boom, "exit": lambda: sys.exit(3), "exit 0": lambda: sys.exit(0), "leave": lambda: os._exit(3),
    "memory": out_of_memory, "stall": wait,
    **{name: lambda name=name: os.kill(os.getpid(), getattr(signal, name))
       for name in ("SIGKILL", "SIGTERM", "SIGUSR1", "SIGINT", "SIGSTOP")},
    **{f"launcher {name}": lambda name=name: os.kill(the_launcher(), getattr(signal, name)) for name in ("SIGTERM", "SIGINT")}}


def in_main_thread(how: str, after: int) -> None:
    from mpshard.loop import Loop

    update = Loop._update

    def failing(self: Loop, output: object) -> None:
        update(self, output)
        if self.step + 1 == after:
            MAIN[how]()

    Loop._update = failing


def in_communication_thread(after: int) -> None:
    from mpshard.comm import collectives

    all_gather, calls = collectives.all_gather, iter(range(10**9))

    def failing(*arguments: object) -> collectives.Operation:
        if threading.current_thread().name == "mpshard-comm" and next(calls) > 10 * after:
            boom()
        yield from all_gather(*arguments)

    collectives.all_gather = failing


def in_checkpoint_thread(after: int) -> None:
    from mpshard.checkpoint import transfer

    write_own, calls = transfer.write_own, iter(range(10**9))

    def failing(*arguments: object) -> list[transfer.Sum]:
        assert threading.current_thread().name == "mpshard-checkpoint"
        if next(calls) == 2:  # of two files each, so in the second checkpoint: the first must stay whole
            boom()
        return write_own(*arguments)

    transfer.write_own = failing


if __name__ == "__main__":
    how, rank, step, *arguments = sys.argv[1:]
    if launcher.rank() == int(rank):
        if how == "communication thread":
            in_communication_thread(int(step))
        elif how == "checkpoint thread":
            in_checkpoint_thread(int(step))
        else:
            in_main_thread(how, int(step))
    cli.main(arguments)
