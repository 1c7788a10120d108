"""`mpshard verify`: it starts the runs that it compares, so it is not run by ranks itself; those come here with --dump."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard import launcher
from mpshard.commands import Add
from mpshard.config import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI
    from rich.console import RenderableType


class _AsRank(argparse.Action):
    """--dump DIR: this process is a rank of one of the runs."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.dump = values
        del namespace.alone


def register(add: Add) -> None:
    sub = add("verify", dump, "Run the first steps of a training on several numbers of ranks, and with several options, and compare: "
              "losses, norms, and the weights to the last bit. Exit status: 0 all alike, 1 not, 2 the command is wrong.",
              "mpshard verify examples/stdlib_gpt.toml --ranks 1,2,4 --vary shard.prefetch=0,2 shard.deterministic=true")
    sub.set_defaults(alone=verify)
    sub.add_argument("config", metavar="CONFIG.toml")
    sub.add_argument("settings", metavar="section.key=value", nargs="*", help="replaces what the file says, in all runs")
    sub.add_argument("--ranks", type=_numbers, default=[1, 2], metavar="N,N,...", help="numbers of ranks (default 1,2)")
    sub.add_argument("--vary", action="append", default=[], metavar="section.key=A,B,...", help="run with each value; may be repeated")
    sub.add_argument("--steps", type=int, default=4, metavar="K", help="steps of each run (default 4)")
    sub.add_argument("--rtol", type=float, metavar="R", help="largest relative difference of a loss, a norm or a tensor; 0 = the same "
                                                            "bits; default: 0 with shard.deterministic=true, else 1e-3")
    sub.add_argument("--threads", type=int, default=0, metavar="T", help="BLAS threads of every rank, the same in all runs; 0 = cores "
                                                                        "/ most ranks (default)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.add_argument("--dump", action=_AsRank, help=argparse.SUPPRESS)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def verify(arguments: argparse.Namespace) -> int:
    """`mpshard verify CONFIG.toml --ranks 1,2,4`."""
    from mpshard.verify.jobs import jobs
    from mpshard.verify.jobs import verify as compare_runs

    a = arguments
    if launcher.launched():
        raise ConfigError("verify starts the ranks itself: run it without mpirun or srun")
    if a.steps < 1 or a.threads < 0 or (a.rtol is not None and not a.rtol >= 0):
        raise ConfigError(f"--steps {a.steps} --threads {a.threads} --rtol {a.rtol}: steps are 1 or more, the others 0 or more")
    found = compare_runs(a.config, a.settings, jobs(a.ranks, a.vary), a.steps, a.rtol, a.threads,
                         lambda line: print(line, file=sys.stderr, flush=True))
    if a.json:
        print(json.dumps(found), flush=True)
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.width = console.width if console.is_terminal else 160
        console.print(_table(found))
        for entry in found["runs"]:
            if entry["first"] is not None:
                console.print(_words(entry), markup=False)
    return 0 if found["ok"] else 1


def _table(found: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    rtol = found["rtol"]
    limit = "equal bits" if rtol == 0 else f"relative differences up to {rtol:g}"
    table = Table(title=f"{found['steps']} steps, {found['threads']} BLAS thread{'s' * (found['threads'] > 1)} a rank; wanted: {limit}")
    for column in ("run", "last loss", "losses", "norms", "weights", "tensors that differ", "most ulps", "verdict"):
        table.add_column(column, justify="left" if column in ("run", "verdict") else "right")
    for number, e in enumerate(found["runs"]):
        apart = [f"{e[key]:.1e}" if e[key] else "0" for key in ("loss", "norm", "weights")]
        verdict = "reference" if number == 0 else "ok" if e["ok"] else "DIFFERS"
        table.add_row(e["label"], f"{e['losses'][-1]:.6f}", *apart, str(e["tensors"]), str(e["ulps"]), verdict)
    return table


def _words(entry: dict[str, Any]) -> str:
    first = entry["first"]
    step = f"; losses and norms from step {entry['first_step']} on" if entry["first_step"] else "; losses and norms agree"
    return (f"{entry['label']}: {first['tensor']}{list(first['index'])} is {first['value']!r}, not {first['reference']!r}, "
            f"{first['ulps']} ulp apart{step}; most apart: {entry['worst']}")


def dump(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """What a rank of one of the runs does."""
    from mpshard import config
    from mpshard.comm.agree import agree
    from mpshard.verify.dump import dump as run

    def read() -> config.Config:
        settings = config.load(arguments.config, arguments.settings)
        config.validate(settings, world.size)
        return settings

    run(agree(world, read), world, Path(arguments.dump), arguments.steps, arguments.threads)
