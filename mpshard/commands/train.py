"""`mpshard train`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpshard import config
from mpshard.commands import Add

if TYPE_CHECKING:
    from mpi4py import MPI


def register(add: Add) -> None:
    keys = "\n".join(f"  {name} = {default}  ({kind}) {text}" for name, kind, default, text in config.describe())
    sub = add("train", train, "Train a model as a TOML file says.",
              f"mpirun -n 2 mpshard train examples/stdlib_gpt.toml optim.lr=2e-3\n\nkeys:\n{keys}")
    sub.add_argument("config", metavar="CONFIG.toml")
    sub.add_argument("settings", metavar="section.key=value", nargs="*", help="replaces what the file says")


def train(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard train CONFIG.toml [section.key=value ...]`."""
    from mpshard import loop
    from mpshard.comm.agree import agree

    def read() -> config.Config:
        settings = config.load(arguments.config, arguments.settings)
        config.validate(settings, world.size)
        return settings

    loop.run(agree(world, read), world)
