"""The commands, one small file for a few of them; what they share is here.

A command is a function of (arguments, world) that all ranks run together, and one call of `add` that registers it:
`register(add)` of the modules in `MODULES` is called with `mpshard.cli`'s `add(name, run, text, example)`, which returns
the command's own argument parser. Modules import what is heavy (NumPy, MPI) inside the functions: `--help` needs none.

What is wrong for the user's reasons is a `ConfigError`, raised on every rank alike (`mpshard.comm.agree`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mpi4py import MPI

MODULES = ("train", "launch", "model", "data", "checkpoint", "plan", "verify", "measure")

Run = Callable[[argparse.Namespace, "MPI.Comm"], None]


class Add(Protocol):
    """Registers a command; `run` None for one that has subcommands of its own."""

    def __call__(self, name: str, run: Run | None, text: str, example: str) -> argparse.ArgumentParser: ...


def show(found: dict[str, Any], draw: Callable[[dict[str, Any]], Any], as_json: bool, world: MPI.Comm) -> None:
    """Print a result on rank 0, as one JSON object or as what `draw` makes of it for a terminal."""
    if world.rank != 0:
        return
    if as_json:
        print(json.dumps(found), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # of a log file or a launcher's pipe, about which nothing is known
    console.print(draw(found))
