"""What a job may leave on this machine when it is killed: processes, and names of shared memory. Linux only.

A launcher gives ranks sessions of their own, so a process group does not find them; a token in the environment does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
RANK_VARIABLES = (b"PMI_RANK", b"OMPI_COMM_WORLD_RANK")
PREFIXES = ("mpich_", "sm_segment.", "osc_sm.", "ucx_shm_")  # of names that MPICH, Open MPI and UCX make


def processes(token: str) -> list[int]:
    """Live processes with NAME=VALUE `token` in their environment."""
    return [pid for pid, _ in _environments(token)]


def ranks(token: str) -> set[str]:
    """Ranks among them that are alive, by the numbers that their launcher gave them."""
    variables = (variable.partition(b"=") for _, environment in _environments(token) for variable in environment)
    return {value.decode() for name, _, value in variables if name in RANK_VARIABLES}


def _environments(token: str) -> Iterator[tuple[int, list[bytes]]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or somebody else's
            environment = (entry / "environ").read_bytes().split(b"\0")  # a zombie's is empty
            if token.encode() in environment:
                yield int(entry.name), environment


def end(token: str, patience: float) -> int:
    """Kill the processes that are still there after `patience` seconds; how many those were."""
    limit = time.monotonic() + patience
    while (left := processes(token)) and time.monotonic() < limit:
        time.sleep(0.05)
    count = len(left)
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = processes(token)
    return count


def segments() -> set[Path]:
    """Names of this user's shared memory that an MPI may have made."""
    found = set()
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        with suppress(OSError):
            if path.name.startswith(PREFIXES) and path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def remove_segments(before: set[Path]) -> list[Path]:
    """Remove names that came since `before` and that no process maps, now and a moment later: nobody can need those.

    Ranks take names away themselves as soon as they can (mpshard.comm.segments); this is for those killed before.
    """
    fresh = segments() - before
    for pause in (0.2, 0.0):
        if not fresh:
            return []
        mapped = _mapped()
        fresh = {path for path in fresh if str(path) not in mapped}
        time.sleep(pause)
    for path in fresh:
        path.unlink(missing_ok=True)
    return sorted(fresh)


def _mapped() -> str:
    parts = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            parts.append(path.read_text(errors="replace"))
    return "".join(parts)
