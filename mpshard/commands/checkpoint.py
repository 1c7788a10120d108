"""Commands on checkpoints and model directories: `mpshard inspect`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mpshard.commands import Add, show

if TYPE_CHECKING:
    from mpi4py import MPI


def register(add: Add) -> None:
    sub = add("inspect", inspect, "Say what a checkpoint or a Hugging Face model directory holds.",
              "mpshard inspect runs/stdlib_gpt --verify")
    sub.add_argument("directory", metavar="DIR", help="of a checkpoint, a model or a run (its latest checkpoint)")
    sub.add_argument("--verify", action="store_true", help="read everything and compare the checksums")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def inspect(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard inspect DIR`."""
    from rich.text import Text

    from mpshard.checkpoint import inspect as inspection

    about = inspection.inspect(world, Path(arguments.directory), arguments.verify)
    show(about, lambda found: Text(inspection.as_text(found)), arguments.json, world)
