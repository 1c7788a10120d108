"""Steps that can fail on some ranks and not on others: all go on, or all stop with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from mpshard.config import ConfigError

T = TypeVar("T")


def agree(comm: MPI.Comm, action: Callable[[], T]) -> T:
    """Run `action` on every rank. If it fails for the user's reasons on any, every rank raises the first one's error.

    Raises
    ------
    ConfigError : one line; names the ranks if not all of them failed. Other exceptions than ConfigError and OSError
        are bugs and pass through, to the abort hook.
    """
    result, problem = None, None
    try:
        result = action()
    except ConfigError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    problems = comm.allgather(problem)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if failed:
        where = "" if len(failed) == comm.size else f" (on rank {', '.join(map(str, failed[:8]))} of {comm.size})"
        raise ConfigError(problems[failed[0]] + where)
    return result
