"""From a directory to a sharded model: every rank reads its own byte ranges, and nothing else of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard import adapters, families
from mpshard import comm as communication
from mpshard.checkpoint import publish, transfer
from mpshard.checkpoint.checksums import join
from mpshard.checkpoint.dtypes import FLOATS
from mpshard.checkpoint.hf_config import from_hf
from mpshard.checkpoint.manifest import OPTIMIZER, CheckpointError, DamagedError, State, Store, open_store
from mpshard.checkpoint.names import match
from mpshard.checkpoint.safetensors_file import Tensor
from mpshard.checkpoint.save import MASTER, optimizer_pieces
from mpshard.checkpoint.transfer import Piece, Sum
from mpshard.comm.agree import on_root
from mpshard.config import LoraConfig
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import Model
from mpshard.nn.lora import add_adapters, is_adapter
from mpshard.shard.sharded import Sharded

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpshard.optim import Optimizer


def load_model(directory: str | Path, comm: MPI.Comm | None = None, *, base: str | Path = "", **options: Any) -> Sharded:
    """The model of a checkpoint or Hugging Face directory, cut over the ranks of `comm`. Collective.

    Parameters
    ----------
    directory: one with config.json and weights, or with adapters; or a run directory, of which the latest checkpoint is taken.
    comm: default COMM_WORLD. base: for adapters the model that they adapt, if it is not where adapter_config.json says.
    options: as of `mpshard.shard`.

    Raises
    ------
    ConfigError, on every rank: what is missing, damaged or not supported.
    """
    from mpshard.shard import shard

    comm = communication.world if comm is None else comm
    stores = [open_on_all(comm, publish.find(Path(directory)))]
    adapter = on_root(comm, lambda: adapters.read_keys(stores[0].directory) if stores[0].is_adapter else None)
    if adapter is not None:
        stores.insert(0, open_on_all(comm, publish.find(Path(base or adapter["base"]))))
    config = on_root(comm, lambda: read_config(stores[0].directory))
    model = gpt2(config) if isinstance(config, GPT2Config) else llama(config)
    if adapter is not None:
        add_adapters(model, LoraConfig(adapter["rank"], adapter["alpha"], adapter["targets"]))
    for store in stores:  # before any memory is taken
        on_root(comm, partial(check_weights, store, model))
    sharded = shard(model, comm, **options)
    for store in stores:
        load_weights(sharded, store)
    return sharded


def read_config(directory: Path) -> GPT2Config | LlamaConfig:
    """The model's shapes from config.json. Raises ConfigError for one that is missing, damaged or not supported."""
    path = directory / "config.json"
    return from_hf(families.read_json(path), str(path))


def open_on_all(comm: MPI.Comm, directory: Path) -> Store:
    """`open_store` by rank 0, for all ranks. Collective."""
    return on_root(comm, lambda: open_store(directory))


def check_weights(store: Store, model: Model) -> dict[str, str]:
    """What the directory calls each parameter of the model: of adapters each of theirs, of a model all others.

    Reads no tensor.

    Raises CheckpointError for tensors that are missing, surplus, of another shape, or not floating point.
    """
    found = store.weights
    wanted = [p for p in model.parameters if is_adapter(p.name) == store.is_adapter]
    names, ignored = match((p.name for p in wanted), found)
    check_tensors(store, {names[p.name]: p.shape for p in wanted},
                  {name: place for name, place in found.items() if name not in ignored})
    for name in names.values():
        if found[name][1].dtype not in FLOATS:
            raise CheckpointError(f"{store.directory}: {name} is stored as {found[name][1].dtype}; weights are one of {', '.join(FLOATS)}")
    return names


def load_weights(sharded: Sharded, store: Store) -> None:
    """Set this rank's weights, or its adapters, from a directory. Collective.

    Raises CheckpointError, on every rank, as `check_weights` does, or for a checksum that does not fit.
    """
    names = check_weights(store, sharded.model)
    pieces = [Piece(names[s.name], s.start, s.stop, unit.shard[s.slice])
              for unit in sharded.units.values() for s in unit.segments if s.name in names]
    read_pieces(sharded, store, store.weights, pieces)
    sharded.publish()


def load_training(sharded: Sharded, optim: Optimizer, store: Store) -> State:
    """Set weights, optimizer and counters as they were when the checkpoint was written; returns where that was. Collective.

    The number of ranks may be another. Raises CheckpointError, on every rank, as `load_weights` does.
    """
    if store.state is None or OPTIMIZER not in store.files:
        raise CheckpointError(f"{store.directory} is a model without optimizer state: training cannot be resumed from it")
    load_weights(sharded, store)
    found = store.optimizer
    units = list(sharded.units.values())
    exact = {unit.name: not any(f"{MASTER}.{place.name}" in found for place in unit.layout.placements) for unit in units}
    mine = optimizer_pieces(units, optim, exact, saving=False)
    shapes = {name: shape for of_rank in sharded.mesh.comm.allgather([spec for _, spec, _ in mine]) for name, _, shape in of_rank}
    check_tensors(store, shapes, found)
    read_pieces(sharded, store, found, [piece for _, _, piece in mine])
    sharded.publish()
    optim.load_state(store.state.optimizer)
    sharded.steps = store.state.random["step"]
    return store.state


def check_tensors(store: Store, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[str, Tensor]]) -> None:
    """Raise CheckpointError unless the directory has exactly the tensors expected, in their shapes."""
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{store.directory} lacks {_some(missing)}")
    if surplus := sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{store.directory} has {_some(surplus)}, which this model has not")
    for name, shape in expected.items():
        if found[name][1].shape != tuple(shape):
            raise CheckpointError(f"{store.directory}: {name} has shape {found[name][1].shape}, this model's is {tuple(shape)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_pieces(sharded: Sharded, store: Store, found: Mapping[str, tuple[str, Tensor]], pieces: Iterable[Piece]) -> None:
    """Fill pieces from whichever files have them, and verify what was read. Collective."""
    comm = sharded.mesh.comm
    of_file: dict[str, list[Piece]] = {file: [] for file, _ in found.values()}
    for piece in pieces:
        of_file[found[piece.name][0]].append(piece)
    for file, mine in sorted(of_file.items()):
        ranges = store.ranges(file)
        ends = {name: [stop for _, stop, _ in of_tensor] for name, of_tensor in ranges.items()}
        sums = transfer.read(comm, store.directory / file, store.files[file], mine, sharded.device, ends)
        if store.state is not None:
            verify(comm, store, file, sums)


def verify(comm: MPI.Comm, store: Store, file: str, sums: list[Sum]) -> None:
    """Compare checksums of what all ranks have read with those written down. Collective.

    A range of which only a part was read cannot be checked and is passed over.
    Raises DamagedError, on every rank, with the file and the tensor.
    """
    gathered = comm.gather(sums)
    problem = None
    if gathered is not None:
        problem = mismatch(store, file, [s for of_rank in gathered for s in of_rank])
    problem = comm.bcast(problem)
    if problem is not None:
        raise DamagedError(problem)


def mismatch(store: Store, file: str, sums: list[Sum]) -> str | None:
    """The first range whose pieces do not add up to its checksum, in words."""
    by_tensor: dict[str, list[Sum]] = {}
    for s in sorted(sums):
        by_tensor.setdefault(s.name, []).append(s)
    for name, ranges in store.ranges(file).items():
        itemsize = store.files[file][name].itemsize
        pieces = by_tensor.get(name, [])
        known = {(p.start, p.stop): p.crc for p in pieces}
        twice = next((p for p in pieces if known[p.start, p.stop] != p.crc), None)  # replicas that read differently
        for start, stop, expected in ranges:
            at, crc = start, 0
            for piece in pieces:
                if piece.start == at and piece.stop <= stop:
                    crc, at = join(crc, piece.crc, (piece.stop - piece.start) * itemsize), piece.stop
            if at == stop and (crc != expected or (twice is not None and start <= twice.start < stop)):
                return f"{store.directory / file} is altered: the checksum of {name}[{start}:{stop}] does not fit"
    return None
