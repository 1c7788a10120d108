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

    sub = add("merge", merge, "Add adapters (LoRA) into the model that they adapt: a model directory without them.",
              "mpirun -n 2 mpshard merge runs/finetune merged --dtype bf16")
    sub.add_argument("adapter", metavar="ADAPTER", help="a directory with adapter_config.json, or a run (its latest checkpoint)")
    sub.add_argument("out", metavar="OUT", help="the directory to write")
    sub.add_argument("--base", default="", metavar="DIR", help="the model that is adapted, if it is not where the adapter says")
    sub.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights written (default fp32)")


def merge(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard merge ADAPTER OUT`."""
    from mpshard import config
    from mpshard import train as training
    from mpshard.checkpoint.merge import export
    from mpshard.checkpoint.merge import merge as merge_in
    from mpshard.comm.agree import agree
    from mpshard.config import ConfigError
    from mpshard.data import load_tokenizer

    a = arguments

    def read() -> config.Config:
        base = [f"model.init_from={a.base}"] if a.base else []
        settings = config.load(None, [f"lora.init_from={a.adapter}", "data.seq_len=1", *base])
        if Path(a.out).exists():
            raise ConfigError(f"{a.out} exists already; choose another")
        return settings

    settings = agree(world, read)
    tokenizer = agree(world, lambda: load_tokenizer(settings.data.tokenizer))
    sharded = training.build_sharded(settings, world)
    merge_in(sharded)
    export(world, sharded, Path(a.out), a.dtype, tokenizer.files(), tokenizer.special_ids)
    sharded.close()


def inspect(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard inspect DIR`."""
    from rich.text import Text

    from mpshard.checkpoint import inspect as inspection

    about = inspection.inspect(world, Path(arguments.directory), arguments.verify)
    show(about, lambda found: Text(inspection.as_text(found)), arguments.json, world)
