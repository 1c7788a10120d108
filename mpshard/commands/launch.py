"""`mpshard launch`: the one command that is not run by ranks, because it starts them."""

from __future__ import annotations

import argparse

from mpshard import launcher
from mpshard.commands import Add
from mpshard.config import ConfigError


def register(add: Add) -> None:
    sub = add("launch", None, "Start a training job with the MPI at hand, and start it again from its last checkpoint when it fails. "
              "Exit status: 0 done (done.json is in the run directory); 75 asked to leave, a checkpoint is written, run the same "
              "again; 2 the command is wrong; others as the job's.",
              "mpshard launch -n 4 --max-restarts 10 -- train examples/stdlib_gpt.toml optim.lr=2e-3")
    sub.set_defaults(alone=launch)
    sub.add_argument("-n", type=int, required=True, metavar="N", help="ranks")
    sub.add_argument("--hosts", default="", metavar="HOST:RANKS,...", help="where; all see this directory, and this Python is theirs too")
    sub.add_argument("--max-restarts", type=int, default=0, metavar="K", help="after failures; 2 in a row without a new checkpoint are "
                                                                              "the last in any case (default 0)")
    sub.set_defaults(command=())


def launch(arguments: argparse.Namespace) -> int:
    """`mpshard launch -n N [--hosts ...] [--max-restarts K] -- train CONFIG.toml [section.key=value ...]`."""
    from mpshard.recover.supervise import supervise

    if launcher.launched():
        raise ConfigError("launch starts the ranks itself: run it without mpirun or srun")
    if arguments.n < 1 or arguments.max_restarts < 0:
        raise ConfigError(f"-n {arguments.n} --max-restarts {arguments.max_restarts}: ranks are 1 or more, restarts 0 or more")
    return supervise(arguments.n, arguments.hosts, arguments.command, arguments.max_restarts)
