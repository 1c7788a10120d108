"""What a job may leave on this machine when it is killed: processes, and names of shared memory. Linux only.

A launcher gives ranks sessions of their own, so a process group does not find them; a token in the environment does.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
PREFIXES = ("mpich_", "sm_segment.", "osc_sm.", "ucx_shm_")  # of names that MPICH, Open MPI and UCX make


def processes(token: str) -> list[int]:
    """Live processes with NAME=VALUE `token` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or somebody else's
            if token.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


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
