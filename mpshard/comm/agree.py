"""Steps that can fail on some ranks and not on others: all go on, or all stop with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from mpi4py import MPI

from mpshard.config import ConfigError

T = TypeVar("T")


def agree(comm: MPI.Comm, action: Callable[[], T]) -> T:
    """Run `action` on every rank. If it fails for the user's reasons on any, every rank raises the first one's error.

    Raises
    ------
    ConfigError : one line; names the ranks if not all of them failed. Of the kind (subclass) that was raised; an OSError
        becomes one. Other exceptions are bugs and pass through, to the abort hook.
    """
    result, problem = _attempt(action)
    problems = comm.allgather(problem)
    failed = [rank for rank, found in enumerate(problems) if found is not None]
    if failed:
        where = "" if len(failed) == comm.size else f" (on rank {', '.join(map(str, failed[:8]))} of {comm.size})"
        kind, text = problems[failed[0]]
        raise kind(text + where)
    return cast(T, result)


def on_root(comm: MPI.Comm, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone and give its result to all, or raise its error on all, as `agree` does. Collective."""
    result, problem = comm.bcast(_attempt(action) if comm.rank == 0 else None)
    if problem is not None:
        kind, text = problem
        raise kind(text)
    return cast(T, result)


def _attempt(action: Callable[[], T]) -> tuple[T | None, tuple[type[ConfigError], str] | None]:
    """What an action returns, and how it failed."""
    try:
        return action(), None
    except ConfigError as error:
        return None, (type(error), str(error))
    except OSError as error:
        return None, (ConfigError, f"{error.filename}: {error.strerror}" if error.filename else str(error))
