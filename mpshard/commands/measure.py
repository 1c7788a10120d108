"""Commands that measure and report: `mpshard bench step|gemm|collectives`, `mpshard report`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpshard.commands import Add, show
from mpshard.config import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI


def register(add: Add) -> None:
    """Add the commands to the parser; see `mpshard.commands`."""
    bench = add("bench", None, "Measure a step, the matrix products it is made of, or how units travel.",
                "mpirun -n 2 mpshard bench step model.d_model=512 model.vocab_size=8192 --steps 8")
    kinds = bench.add_subparsers(metavar="step|gemm|collectives", required=True)

    def kind(name: str, run: Callable[..., None], text: str, example: str) -> argparse.ArgumentParser:
        sub = kinds.add_parser(name, help=text, description=text, epilog=f"example:\n  {example}",
                               formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    sub = kind("step", bench_step, "Whole training steps on random tokens.",
               "mpirun -n 2 mpshard bench step examples/stdlib_gpt.toml train.micro_batch_size=8 --json")
    _add_settings(sub)
    sub.add_argument("--steps", type=_positive, default=8, help="steps that are measured (default 8)")
    sub.add_argument("--warmup", type=_positive, default=2, help="steps before them (default 2)")
    sub.add_argument("--no-gemm", action="store_true", help="do not time the matrix products alone for comparison")

    sub.add_argument("--overhead", action="store_true",
                     help="also the CPU time of the same instructions on a model of almost no size: what Python costs, at most")

    sub = kind("gemm", bench_gemm, "Matrix products alone, in the three orientations of a linear layer.",
               "mpirun -n 2 mpshard bench gemm --shape 2048,512,2048")
    _add_settings(sub)
    sub.add_argument("--shape", type=_shape, action="append", metavar="ROWS,INNER,COLUMNS",
                     help="of a product, instead of the model's; may be repeated")

    sub = kind("collectives", bench_collectives, "Gathers and reduces of a unit, by each transport, alone and behind compute.",
               "mpirun -n 2 mpshard bench collectives --bytes 1e6 --bytes 5e7")
    sub.add_argument("--bytes", type=_bytes, action="append", help="of a full unit; may be repeated")
    sub.add_argument("--progress", choices=("auto", "poll", "timer", "thread"), default="auto", help="as shard.progress")

    sub = add("doctor", doctor, "Say what is slow or wrong with this launch and machine, and the remedy.",
              "mpirun -n 2 mpshard doctor")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = add("report", report, "Say on one screen how a run went: losses, rates, waits, memory, events.",
              "mpshard report runs/stdlib_gpt")
    sub.add_argument("run_directory", metavar="RUN", help="a run directory, or a metrics.jsonl")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def bench_step(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard bench step [CONFIG.toml] [section.key=value ...]`."""
    from mpshard.bench import step, tables
    from mpshard.comm.agree import agree

    config = agree(world, lambda: step.load(*_split(arguments.settings), world.size))
    found = step.measure(config, world, arguments.steps, arguments.warmup, not arguments.no_gemm, arguments.overhead)
    show(found, tables.step_table, arguments.json, world)


def bench_gemm(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard bench gemm [CONFIG.toml] [section.key=value ...] [--shape ROWS,INNER,COLUMNS]`."""
    from mpshard import models
    from mpshard.bench import gemm, step, tables
    from mpshard.bench.work import Product, products
    from mpshard.comm.agree import agree
    from mpshard.comm.mesh import Mesh
    from mpshard.device import open_device
    from mpshard.device.blas import set_blas_threads

    config = agree(world, lambda: step.load(*_split(arguments.settings), world.size))
    if arguments.shape:
        shapes = {Product(*shape): 1 for shape in arguments.shape}
    else:
        shapes = products(models.from_config(config.model), config.train.micro_batch_size * config.data.seq_len)
    set_blas_threads(Mesh(world).cores)
    show(gemm.measure(open_device(config.run.device), world, shapes), tables.gemm_table, arguments.json, world)


def bench_collectives(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard bench collectives [--bytes N]`."""
    from mpshard.bench import tables, transports
    from mpshard.device import open_device

    if world.size == 1:
        raise ConfigError("bench collectives needs at least 2 ranks: mpirun -n 2 mpshard bench collectives")
    sizes = arguments.bytes or transports.SIZES
    found = transports.measure(world, open_device("numpy"), sizes, arguments.progress)
    show(found, tables.collectives_table, arguments.json, world)


def doctor(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard doctor`."""
    import os

    from mpshard import doctor

    show(doctor.examine(world, os.environ), doctor.screen, arguments.json, world)


def report(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard report RUN`."""
    from pathlib import Path

    from mpshard.comm.agree import on_root
    from mpshard.observe import report

    records = on_root(world, lambda: report.read_metrics(Path(arguments.run_directory)))
    show(report.summary(records), lambda found: report.screen(records), arguments.json, world)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", metavar="[CONFIG.toml] section.key=value", nargs="*",
                        help="a configuration and changes to it; without a file the defaults")


def _split(settings: Sequence[str]) -> tuple[str | None, list[str]]:
    """A file, if the first word is one, and the section.key=value words."""
    if settings and "=" not in settings[0]:
        return settings[0], list(settings[1:])
    return None, list(settings)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _bytes(text: str) -> int:
    return _positive(str(int(float(text))))


def _shape(text: str) -> tuple[int, ...]:
    numbers = tuple(_positive(part) for part in text.split(","))
    if len(numbers) != 3:
        raise argparse.ArgumentTypeError(f"{text} must be three numbers: rows,inner,columns")
    return numbers
