"""`mpshard plan`: what a configuration will cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpshard.commands import Add, show

if TYPE_CHECKING:
    from mpi4py import MPI


def register(add: Add) -> None:
    sub = add("plan", plan, "Say what a configuration will hold and move, on any number of ranks, without running it.",
              "mpshard plan examples/stdlib_gpt.toml --ranks 1,2,4,8 --device-bytes 16e9")
    sub.add_argument("config", metavar="CONFIG.toml")
    sub.add_argument("settings", metavar="section.key=value", nargs="*", help="replaces what the file says")
    sub.add_argument("--ranks", type=_ranks, metavar="N,...", help="numbers of ranks (default: those of this launch, or 1,2,4,8)")
    sub.add_argument("--ranks-per-node", type=int, default=0, metavar="N", help="default: all on one node")
    sub.add_argument("--device-bytes", type=float, default=0, metavar="BYTES",
                     help="memory of a rank: say what fits, and from how many ranks on")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def plan(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard plan CONFIG.toml [section.key=value ...]`."""
    from mpshard import config
    from mpshard.comm.agree import on_root
    from mpshard.plan import plans
    from mpshard.plan.table import plan_table

    settings = on_root(world, lambda: config.load(arguments.config, arguments.settings))
    ranks = arguments.ranks or ([world.size] if world.size > 1 else [1, 2, 4, 8])
    found = on_root(world, lambda: plans(settings, ranks, int(arguments.device_bytes), arguments.ranks_per_node))
    show(found, plan_table, arguments.json, world)


def _ranks(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a job has at least one rank")
    return numbers
