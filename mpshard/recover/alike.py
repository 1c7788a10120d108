"""Before anything is trained: do all ranks run the same program, on the same configuration, in the same directory?"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard import __version__
from mpshard.comm.agree import agree, on_root
from mpshard.config import Config, ConfigError, flat, show
from mpshard.shard.sharded import Sharded

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE = 5.0  # seconds that a network file system may take to show a new file elsewhere


def check_start(comm: MPI.Comm, config: Config) -> None:
    """Same versions and configuration on all ranks, and one run directory. Collective.

    Raises ConfigError, on every rank: one line, what differs on which rank.
    """
    facts: dict[str, Any] = {"mpshard": __version__, "Python": platform.python_version()}
    check_alike(comm, facts | flat(config))
    check_folder(comm, Path(config.run.dir))


def check_program(sharded: Sharded, micro_batches: int) -> None:
    """Same units and instructions on all ranks: otherwise they would wait for each other for ever. Collective.

    Raises ConfigError as `check_start` does.
    """
    units = [(unit.name, unit.layout.size, unit.layout.padded_size) for unit in sharded.units.values()]
    text = repr((units, sharded.transport.name, sharded.program(micro_batches)))
    check_alike(sharded.mesh.comm, {"the program of a step": hashlib.sha256(text.encode()).hexdigest()[:12]})


def check_alike(comm: MPI.Comm, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank unless all have brought the same facts. Collective."""
    everywhere = comm.allgather((socket.gethostname(), dict(facts)))
    if problem := difference([host for host, _ in everywhere], [of_rank for _, of_rank in everywhere]):
        raise ConfigError(problem)


def difference(hosts: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> str | None:
    """The first fact that is not the same on all ranks, and where it is what; None if there is none."""
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        values = [show(of_rank[name]) if name in of_rank else "missing" for of_rank in facts]
        usual, _ = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            where = ", ".join(f"{values[rank]} on rank {rank} ({hosts[rank]})" for rank in odd[:4])
            more = f" and {len(odd) - 4} more ranks differ" if len(odd) > 4 else ""
            return f"ranks differ: {name} is {usual} on {len(values) - len(odd)} of {len(values)} ranks, {where}{more}"
    return None


def check_folder(comm: MPI.Comm, folder: Path) -> None:
    """Raise ConfigError on every rank unless all see the same directory, which exists on rank 0. Collective."""
    mark = folder / f".seen-by-{comm.bcast(secrets.token_hex(4))}"

    def leave_mark() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()

    on_root(comm, leave_mark)

    def look() -> None:
        end = time.monotonic() + PATIENCE
        while not mark.exists():
            if time.monotonic() > end:
                raise ConfigError(f"run.dir={folder} on {socket.gethostname()} is not the directory that rank 0 sees; "
                                  "name one on a file system that all nodes share")
            time.sleep(0.05)
            if folder.is_dir():
                os.listdir(folder)  # makes a network file system ask its server again

    try:
        agree(comm, look)
    finally:
        on_root(comm, lambda: mark.unlink(missing_ok=True))
