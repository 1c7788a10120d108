"""What a checkpoint of a sharded model holds: the files of a Hugging Face directory, and this rank's pieces of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpshard import __version__, adapters
from mpshard.checkpoint.dtypes import code_of, is_exact
from mpshard.checkpoint.hf_config import to_hf
from mpshard.checkpoint.manifest import ADAPTER, OPTIMIZER, State
from mpshard.checkpoint.safetensors_file import INDEX, Spec, index, split
from mpshard.checkpoint.transfer import Piece
from mpshard.device.base import Array, Device, Kind
from mpshard.nn.lora import peft_config
from mpshard.shard.sharded import Sharded
from mpshard.shard.unit import Unit

if TYPE_CHECKING:

    from mpshard.optim import Optimizer

MASTER = "master"  # kind of the exact weights in optimizer.safetensors, where model.safetensors rounds them


@dataclass(frozen=True)
class Content:
    """All that a checkpoint directory will hold: this rank's pieces of each file, and the files that rank 0 writes.

    specs: the tensors of each safetensors file, in order, the same on every rank.
    pieces: this rank's, arrays of the model itself or copies of them (see `snapshot`); `writing` writes them.
    """

    state: State
    specs: Mapping[str, Sequence[Spec]]
    pieces: Mapping[str, Sequence[Piece]]
    texts: Mapping[str, bytes]


def content_of(sharded: Sharded, optim: Optimizer | None, state: State, *, dtype: str = "", max_shard_bytes: int = 0,
               tokenizer: Mapping[str, bytes] | None = None, special_ids: Mapping[str, Any] | None = None,
               averaged: bool = False, whole: bool = False) -> Content:
    """What to write down of a model and its optimizer. Collective; nothing is copied.

    Parameters
    ----------
    optim: None to leave the optimizer out: then training cannot be resumed from it.
    state: its counters (step, position, ...); the rest is filled in here and in `writing`.
    dtype: "fp32" or "bf16", type of the weights in the file; "" as they are. If it rounds them, the exact weights are
        kept in optimizer.safetensors.
    max_shard_bytes: larger models are cut into several files; 0: never.
    tokenizer: the files that belong to it and their contents. special_ids: of config.json, see `to_hf`.
    averaged: the model's files hold the running average of the weights, optimizer.safetensors the weights themselves.
    whole: of a model with adapters write the model, and not the adapters.
    """
    averages = optim.average.slices if averaged and optim is not None and optim.average is not None else {}
    lora = sharded.model.lora
    units, weights, exact = list(sharded.units.values()), [], dict.fromkeys(sharded.units, True)
    if lora is not None:  # the adapters are what learns, and nothing else does
        units = [unit for unit in units if unit.learns != whole]
    for unit in units:
        code = {"": code_of(unit.dtype), "fp32": "F32", "bf16": "BF16"}[dtype]
        exact[unit.name] = is_exact(unit.dtype, code) and unit.name not in averages
        weights += [(place.name, code, place.shape) for place in unit.layout.placements]
    adapters_alone = lora is not None and not whole
    files = {ADAPTER: weights} if adapters_alone else split(weights, max_shard_bytes)
    home = {spec[0]: file for file, specs in files.items() for spec in specs}
    pieces: dict[str, list[Piece]] = {file: [] for file in files}
    for unit in units:
        values: Array = averages.get(unit.name, unit.shard)
        for s in unit.owned:
            pieces[home[s.name]].append(Piece(s.name, s.start, s.stop, values[s.slice]))
    specs: dict[str, Sequence[Spec]] = dict(files)
    if optim is not None:
        specs[OPTIMIZER], pieces[OPTIMIZER] = _of_optimizer(sharded, optim, exact)
        state = replace(state, optimizer=optim.state())
    state = replace(state, random={"seed": sharded.seed, "step": sharded.steps}, world=sharded.mesh.world,
                    tokenizer="tokenizer.json" if tokenizer else "", version=__version__)
    if adapters_alone:  # and no config.json: with one `transformers` would look for the model here
        texts = {adapters.CONFIG: _json(peft_config(sharded.model, state.config.get("model.init_from", "")))}
    else:
        texts = {"config.json": _json(to_hf(sharded.model.config, weights[0][1], special_ids))}
    if len(files) > 1:
        texts[INDEX] = _json(index(files))
    return Content(state, specs, pieces, texts | dict(tokenizer or {}))


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


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
        if not device.on_host:  # offloaded: it is in the host's memory anyway
            return array.copy()
        own = device.empty(array.size, array.dtype, Kind.STAGING)
        own[:] = array
        return own

    pieces = {file: [replace(p, array=copy(p.array)) for p in of_file] for file, of_file in content.pieces.items()}
    return replace(content, pieces=pieces)
