"""Adapters added into the matrices that they change: a model like any other, in a directory of its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard.checkpoint import save, writing
from mpshard.checkpoint.manifest import CheckpointError, State
from mpshard.comm.agree import on_root
from mpshard.nn.lora import linear_layers
from mpshard.shard.sharded import Sharded

if TYPE_CHECKING:
    from mpi4py import MPI


def merge(sharded: Sharded) -> None:
    """W + scale * B A for every adapted matrix, on each rank for its own slice. The adapters stay, and must not be used again.

    Hu et al. 2021 (arXiv:2106.09685), section 4.1. Collective: the adapters are gathered, the matrices are not.
    """
    whole = sharded.full_weights(lambda unit: unit.learns)
    adapted = {weight.name: (weight, weight.adapter) for weight in linear_layers(sharded.model).values() if weight.adapter is not None}
    for unit in sharded.units.values():
        for s in unit.segments:
            if s.name not in adapted:
                continue
            weight, adapter = adapted[s.name]
            columns = weight.shape[1]
            rows = slice(s.start // columns, -(-s.stop // columns))  # those that the segment touches
            a, b = whole[adapter.a.name], whole[adapter.b.name]
            change = (a[:, rows].T @ b.T if weight.transposed else b[rows] @ a) * np.asarray(adapter.scale, a.dtype)
            first = s.start - rows.start * columns
            merged = sharded.device.to_host(unit.shard[s.slice]) + change.reshape(-1)[first:first + s.size]
            unit.master.write(s.slice, merged)
    sharded.publish()


def export(comm: MPI.Comm, sharded: Sharded, directory: Path, dtype: str = "fp32", tokenizer: Mapping[str, bytes] | None = None,
           special_ids: Mapping[str, Any] | None = None, max_shard_bytes: int = 0) -> None:
    """Write a model, without adapters and optimizer, into a new directory. Collective.

    dtype, ...: as of `content_of`. Raises ConfigError, on every rank, if the directory exists or cannot be written.
    """
    def begin() -> Path:
        if directory.exists():
            raise CheckpointError(f"{directory} exists already; choose another")
        directory.parent.mkdir(parents=True, exist_ok=True)
        return directory.with_name(f".{directory.name}.partial")

    def finish() -> None:
        written.rename(directory)
        shutil.rmtree(root)

    root = on_root(comm, begin)
    content = save.content_of(sharded, None, State(), dtype=dtype, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer,
                              special_ids=special_ids, whole=True)
    written = writing.write(comm, root, content, sharded.device)
    on_root(comm, finish)
