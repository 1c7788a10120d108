"""`shard`: from a model's shapes and some ranks to a model that can be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard import comm as communication
from mpshard.comm import shared
from mpshard.comm.agree import agree
from mpshard.comm.collectives import progress_for
from mpshard.comm.mesh import Mesh
from mpshard.comm.transport import MessageTransport, Transport
from mpshard.config import ConfigError
from mpshard.device import open_device
from mpshard.device.base import Device
from mpshard.nn.module import Model
from mpshard.shard.sharded import Sharded

if TYPE_CHECKING:
    from mpi4py import MPI


def shard(model: Model, comm: MPI.Comm | None = None, *, strategy: str = "full", prefetch: int = 1, reduce: str = "mpi",
          transport: str = "auto", progress: str = "auto", device: Device | str = "numpy", seed: int = 0,
          dtype: Any = "float32", ignore_index: int = -100, ranks_on_node: int = 0) -> Sharded:
    """Cut a model into units over the ranks of `comm` and give each rank its slice, filled with initial values.

    Parameters
    ----------
    model: shapes only, from `mpshard.models`.
    comm: default COMM_WORLD. Collective over it.
    strategy: "full", ZeRO-3: weights, gradients and moments are sharded.
    prefetch: how many stages ahead of the compute a gather is started, in both directions.
    reduce: of messages: "mpi", MPI's reduce-scatter; "alltoall", an all-to-all and a local sum in rank order.
    transport: "mpi", plain messages; "shm", memory that the ranks of a node share; "auto", shm where it can be had.
    progress: "poll" between kernels; "thread": one that runs the communication, for ranks with a core to spare;
        "auto" chooses.
    device: "numpy", or a Device.
    seed: with parameter names, decides initial values and dropout masks.
    dtype: of weights, gradients and arithmetic.
    ignore_index: the target that means "nothing to learn here".
    ranks_on_node: 0, what MPI says; a divisor of it cuts a node into several, for tests.

    Raises
    ------
    ConfigError, on every rank, for a choice that is not known or cannot be had here.
    """
    _one_of("strategy", strategy, ("full",))
    _one_of("reduce", reduce, ("mpi", "alltoall"))
    _one_of("transport", transport, ("auto", "mpi", "shm"))
    if prefetch < 0:
        raise ConfigError(f"shard.prefetch={prefetch} must be 0 or more")
    mesh = Mesh(communication.world if comm is None else comm)
    opened = agree(mesh.comm, lambda: open_device(device)) if isinstance(device, str) else device
    mover = progress_for(progress, mesh.cores, mesh.world)
    carrier: Transport
    node = ranks_on_node or mesh.ranks_on_node
    # Of shared memory a node needs the whole model once, and each rank's gradient buffers, of which the largest
    # unit counts; twice the model is more than that unless one unit is nearly all of it.
    problem = shared.fits(mesh.comm, mesh.node, 2 * model.size * np.dtype(dtype).itemsize)
    if transport == "shm" and problem is not None:
        raise ConfigError(f"shard.transport=shm cannot be used: {problem}; use shard.transport=mpi")
    if transport != "mpi" and problem is None:
        carrier = shared.SharedTransport(mesh.comm, node, opened, mover)
    else:
        carrier = MessageTransport(mesh.comm, opened, mover, ordered=reduce == "alltoall")
    return Sharded(model, mesh, opened, carrier, mover, prefetch=prefetch, seed=seed, dtype=dtype, ignore_index=ignore_index)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"shard.{name}={value!r} is not known; use {' or '.join(known)}")
