"""The command line: `mpshard train`, alone or under mpirun/srun.

Every command runs on every rank. What is wrong for the user's reasons is one line on rank 0 and exit status 2
everywhere; anything else is a bug, whose traceback ends the job (`mpshard.comm.abort`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpshard import __version__, cli_measure, config
from mpshard.config import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

USAGE_STATUS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits the process."""
    arguments = parser().parse_args(argv)
    sys.exit(in_world(arguments.run, arguments))


def in_world(command: Callable[[argparse.Namespace, MPI.Comm], None], arguments: argparse.Namespace) -> int:
    """Run a command on this rank of the job; 0, or 2 after a one-line error."""
    from mpshard.comm import abort, world

    abort.install(world)
    try:
        command(arguments, world)
    except ConfigError as error:  # raised on every rank alike: see mpshard.comm.agree
        world.Barrier()
        if world.rank == 0:
            print(f"mpshard: {error}", file=sys.stderr, flush=True)
        return USAGE_STATUS
    return 0


def train(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard train CONFIG.toml [section.key=value ...]`."""
    from mpshard import train as training
    from mpshard.comm.agree import agree

    def read() -> config.Config:
        settings = config.load(arguments.config, arguments.settings)
        config.validate(settings, world.size)
        return settings

    training.run(agree(world, read), world)


def inspect(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard inspect DIR`."""
    import json
    from pathlib import Path

    from mpshard.checkpoint import inspect as inspection

    about = inspection.inspect(world, Path(arguments.directory), arguments.verify)
    if world.rank == 0:
        print(json.dumps(about) if arguments.json else inspection.as_text(about), flush=True)


def parser() -> argparse.ArgumentParser:
    """All commands with their options; each `--help` ends with an example."""
    top = argparse.ArgumentParser(prog="mpshard", description="Fully sharded training on arrays and MPI.")
    top.add_argument("--version", action="version", version=f"mpshard {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[..., None], text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=f"example:\n  {example}",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(run=run)
        return sub

    sub = add("train", train, "Train a model as a TOML file says.",
              "mpirun -n 2 mpshard train examples/stdlib_gpt.toml optim.lr=2e-3\n\nkeys:\n" + _keys())
    sub.add_argument("config", metavar="CONFIG.toml")
    sub.add_argument("settings", metavar="section.key=value", nargs="*", help="replaces what the file says")

    sub = add("inspect", inspect, "Say what a checkpoint or a Hugging Face model directory holds.",
              "mpshard inspect runs/stdlib_gpt --verify")
    sub.add_argument("directory", metavar="DIR", help="of a checkpoint, a model or a run (its latest checkpoint)")
    sub.add_argument("--verify", action="store_true", help="read everything and compare the checksums")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    cli_measure.register(add)
    return top


def _keys() -> str:
    return "\n".join(f"  {name} = {default}  ({kind}) {text}" for name, kind, default, text in config.describe())
