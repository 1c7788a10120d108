"""From a sharded model to a directory that `transformers` opens: all ranks write at once, nothing is gathered."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard import __version__
from mpshard.checkpoint import manifest, publish, transfer
from mpshard.checkpoint.dtypes import code_of, is_exact
from mpshard.checkpoint.hf_config import to_hf
from mpshard.checkpoint.manifest import OPTIMIZER, STATE, CheckpointError, DamagedError, State
from mpshard.checkpoint.safetensors_file import INDEX, Spec, Tensor, index, lay_out, split
from mpshard.checkpoint.transfer import Piece, Sum
from mpshard.comm.agree import agree, on_root
from mpshard.config import ConfigError
from mpshard.device.base import Array, Device, Kind
from mpshard.shard.sharded import Sharded
from mpshard.shard.unit import Unit

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpshard.optim import Optimizer

MASTER = "master"  # kind of the exact weights in optimizer.safetensors, where model.safetensors rounds them


@dataclass(frozen=True)
class Content:
    """All that a checkpoint directory will hold: this rank's pieces of each file, and the files that rank 0 writes.

    specs: the tensors of each safetensors file, in order, the same on every rank.
    pieces: this rank's, arrays of the model itself or copies of them (see `snapshot`).
    """

    state: State
    specs: Mapping[str, Sequence[Spec]]
    pieces: Mapping[str, Sequence[Piece]]
    texts: Mapping[str, bytes]


def content_of(sharded: Sharded, optim: Optimizer | None, state: State, *, dtype: str = "", max_shard_bytes: int = 0,
               tokenizer: Mapping[str, bytes] | None = None, special_ids: Mapping[str, Any] | None = None,
               averaged: bool = False) -> Content:
    """What to write down of a model and its optimizer. Collective; nothing is copied.

    Parameters
    ----------
    optim: None to leave the optimizer out: then training cannot be resumed from it.
    state: its counters (step, position, ...); the rest is filled in here and by `write`.
    dtype: "fp32" or "bf16", type of the weights in the file; "" as they are. If it rounds them, the exact weights are
        kept in optimizer.safetensors.
    max_shard_bytes: larger models are cut into several files; 0: never.
    tokenizer: the files that belong to it and their contents. special_ids: of config.json, see `to_hf`.
    averaged: the model's files hold the running average of the weights, optimizer.safetensors the weights themselves.
    """
    averages = optim.average.slices if averaged and optim is not None and optim.average is not None else {}
    units, weights, exact = list(sharded.units.values()), [], {}
    for unit in units:
        code = {"": code_of(unit.dtype), "fp32": "F32", "bf16": "BF16"}[dtype]
        exact[unit.name] = is_exact(unit.dtype, code) and unit.name not in averages
        weights += [(place.name, code, place.shape) for place in unit.layout.placements]
    files = split(weights, max_shard_bytes)
    home = {spec[0]: file for file, specs in files.items() for spec in specs}
    pieces: dict[str, list[Piece]] = {file: [] for file in files}
    for unit in units:
        for s in unit.owned:
            pieces[home[s.name]].append(Piece(s.name, s.start, s.stop, averages.get(unit.name, unit.shard)[s.slice]))
    specs: dict[str, Sequence[Spec]] = dict(files)
    if optim is not None:
        specs[OPTIMIZER], pieces[OPTIMIZER] = _of_optimizer(sharded, optim, exact)
        state = replace(state, optimizer=optim.state())
    state = replace(state, random={"seed": sharded.seed, "step": sharded.steps}, world=sharded.mesh.world,
                    tokenizer="tokenizer.json" if tokenizer else "", version=__version__)
    config = to_hf(sharded.model.config, weights[0][1], special_ids)
    texts = {"config.json": json.dumps(config, indent=2).encode() + b"\n"}
    if len(files) > 1:
        texts[INDEX] = json.dumps(index(files), indent=2).encode() + b"\n"
    return Content(state, specs, pieces, texts | dict(tokenizer or {}))


def optimizer_pieces(units: Sequence[Unit], optim: Optimizer, exact: Mapping[str, bool],
                     saving: bool) -> list[tuple[tuple[int, str, int], Spec, Piece]]:
    """This rank's part of optimizer.safetensors: (place in the file's order, tensor, piece).

    saving: only what this rank writes; else all that it holds, which is more where ranks hold the same.
    exact: units whose weights the model's files hold as they are; of the others the masters go here.
    """
    found = []
    for u, unit in enumerate(units):
        places = {place.name: (p, place.shape) for p, place in enumerate(unit.layout.placements)}
        for s in unit.owned if saving else unit.segments:
            kinds = optim.state_tensors(unit, s) if unit.learns else {}
            if not exact[unit.name]:
                kinds[MASTER] = unit.shard[s.slice]
            p, shape = places[s.name]
            for kind, array in kinds.items():
                name = f"{kind}.{s.name}"
                found.append(((u, kind, p), (name, code_of(array.dtype), shape), Piece(name, s.start, s.stop, array)))
    return sorted(found, key=lambda entry: (entry[0], entry[2].start))


def _of_optimizer(sharded: Sharded, optim: Optimizer, exact: Mapping[str, bool]) -> tuple[list[Spec], list[Piece]]:
    """The tensors of optimizer.safetensors, agreed between the ranks, and this rank's pieces. Collective."""
    mine = optimizer_pieces(list(sharded.units.values()), optim, exact, saving=True)
    everywhere = sharded.mesh.comm.allgather([(order, spec) for order, spec, _ in mine])
    specs = dict(entry for of_rank in everywhere for entry in of_rank)
    return [spec for _, spec in sorted(specs.items())], [piece for _, _, piece in mine]


def snapshot(content: Content, device: Device) -> Content:
    """The same with copies of this rank's arrays in host memory, so that training can go on while they are written."""

    def copy(array: Array) -> Array:
        host = device.to_host(array)
        if host is not array:  # from a device's memory: a copy already
            return host
        own = device.empty(array.size, array.dtype, Kind.STAGING)
        own[:] = array
        return own

    pieces = {file: [replace(p, array=copy(p.array)) for p in of_file] for file, of_file in content.pieces.items()}
    return replace(content, pieces=pieces)


def write(comm: MPI.Comm, root: Path, content: Content, device: Device, keep: int = 2) -> Path:
    """Write a checkpoint into `root`, verify it, publish it; returns its directory. Collective.

    keep: how many checkpoints stay in `root`; 0 for all.

    Raises
    ------
    ConfigError, on every rank: disk full, no permission, what was read back is not what was written. Earlier checkpoints
    are as they were, and nothing of this one is left.
    """
    headers = {file: lay_out(specs) for file, specs in content.specs.items()}
    needed = sum(max((t.stop for t in tensors.values()), default=len(header)) for header, tensors in headers.values())
    partial = on_root(comm, lambda: _begin(root, content.state.step, needed))
    try:
        files = {}
        for file, (header, tensors) in headers.items():
            sums = transfer.write(comm, partial / file, header, tensors, content.pieces[file], device)
            _verify(comm, partial / file, tensors, content.pieces[file], sums, device)
            of_all = comm.gather(sums)
            if of_all is not None:
                ranges = manifest.in_order([s for of_rank in of_all for s in of_rank])
                files[file] = manifest.describe_data(header, tensors, ranges)
        return on_root(comm, lambda: _finish(partial, content, files, keep))
    except (OSError, ValueError):
        on_root(comm, lambda: publish.discard(partial))
        raise


def _begin(root: Path, step: int, needed: int) -> Path:
    partial = publish.begin(root, step)
    if needed > (free := _free(partial)):
        publish.discard(partial)
        raise CheckpointError(f"{root}: no space for a checkpoint of {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free")
    return partial


def _free(path: Path) -> int:
    """Bytes that may still be written there."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _verify(comm: MPI.Comm, path: Path, tensors: Mapping[str, Tensor], pieces: Sequence[Piece], sums: Sequence[Sum],
            device: Device) -> None:
    """Read back what this rank has written and compare. Collective; ConfigError on every rank.

    Needed, not only careful: Open MPI's collective writes report success on a full disk.
    """
    def compare(read: Sequence[Sum]) -> None:
        for ours, theirs in zip(sums, read, strict=True):
            if ours != theirs:
                raise DamagedError(f"{path}: {ours.name} was not read back as it was written")

    try:
        again = transfer.read(comm, path, tensors, [replace(piece, array=None) for piece in pieces], device)
        agree(comm, lambda: compare(again))
    except ConfigError as error:
        free = on_root(comm, lambda: _free(path.parent))
        raise CheckpointError(f"{error}; {free / 1e6:,.1f} MB are free there, is it full or is there a quota?") from None


def _finish(partial: Path, content: Content, files: dict, keep: int) -> Path:
    for name, text in content.texts.items():
        publish.write_file(partial / name, text)
        files[name] = manifest.describe_text(text)
    publish.write_file(partial / STATE, replace(content.state, files=files).dumps().encode())
    manifest.open_store(partial)  # what a resume will check, checked now
    return publish.publish(partial, keep)
