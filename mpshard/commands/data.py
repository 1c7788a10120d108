"""Commands on data: `mpshard tokenize`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpshard.commands import Add, show

if TYPE_CHECKING:
    from mpi4py import MPI


def register(add: Add) -> None:
    """Add the commands to the parser; see `mpshard.commands`."""
    sub = add("tokenize", tokenize, "Turn text and JSONL files into a .bin file of token ids, documents separated.",
              "mpshard tokenize corpus/*.jsonl --tokenizer DIR --out corpus.bin")
    sub.add_argument("files", metavar="FILE", nargs="+", help="text (a document each), .jsonl (one a line), or a glob")
    sub.add_argument("--tokenizer", required=True, help="as data.tokenizer: a tokenizer.json, its directory, or bytes")
    sub.add_argument("--out", required=True, metavar="FILE.bin", help="raw uint16 ids, or uint32 for vocabularies above 65536")
    sub.add_argument("--field", default="text", help="of a JSONL record, its text (default text)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def tokenize(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard tokenize FILES --tokenizer T --out FILE.bin`. Rank 0 alone works."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from mpshard.comm.agree import on_root
    from mpshard.config import ConfigError
    from mpshard.data import load_tokenizer
    from mpshard.data import tokenize as work

    def run() -> tuple[int, int]:
        if not arguments.out.endswith(".bin"):
            raise ConfigError(f"--out={arguments.out} must end with .bin, by which data.train knows it")
        paths, size = work.files_of(arguments.files)
        tokenizer = load_tokenizer(arguments.tokenizer)
        columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("tokenize", total=size)
            return work.tokenize(paths, tokenizer, arguments.out, arguments.field, lambda read: bar.advance(task, read))

    documents, tokens = on_root(world, run)
    show({"documents": documents, "tokens": tokens, "file": arguments.out},
         lambda found: f"{documents:,} documents, {tokens:,} tokens in {arguments.out}", arguments.json, world)
