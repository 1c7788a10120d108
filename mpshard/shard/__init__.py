"""The sharding story: layout, unit, schedule, engine, and `shard`, which puts them together."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpshard.comm.collectives import progress_for
from mpshard.comm.mesh import Mesh
from mpshard.comm.transport import MessageTransport
from mpshard.device import open_device
from mpshard.device.base import Device
from mpshard.nn.module import Model
from mpshard.shard.sharded import Sharded, StepOutput

__all__ = ["Sharded", "StepOutput", "shard"]


def shard(model: Model, comm: MPI.Comm | None = None, *, strategy: str = "full", prefetch: int = 1, reduce: str = "mpi",
          transport: str = "auto", progress: str = "auto", device: Device | str = "numpy", seed: int = 0,
          dtype: Any = "float32", ignore_index: int = -100) -> Sharded:
    """Cut a model into units over the ranks of `comm` and give each rank its slice, filled with initial values.

    Parameters
    ----------
    model: shapes only, from `mpshard.models`.
    comm: default COMM_WORLD. Collective over it.
    strategy: "full", ZeRO-3: weights, gradients and moments are sharded.
    prefetch: how many stages ahead of the compute a gather is started, in both directions.
    reduce: "mpi", MPI's reduce-scatter; "alltoall", an all-to-all and a local sum in rank order.
    transport: "mpi", plain messages; "auto" chooses.
    progress: "poll" between kernels; "thread": one that runs the communication, for ranks with a core to spare;
        "auto" chooses.
    device: "numpy", or a Device.
    seed: with parameter names, decides initial values and dropout masks.
    dtype: of weights, gradients and arithmetic.
    ignore_index: the target that means "nothing to learn here".
    """
    if strategy != "full":
        raise ValueError(f'strategy={strategy!r} is not known; use "full"')
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch} must be 0 or more")
    if reduce not in ("mpi", "alltoall"):
        raise ValueError(f'reduce={reduce!r} is not known; use "mpi" or "alltoall"')
    if transport not in ("auto", "mpi"):
        raise ValueError(f'transport={transport!r} is not known; use "auto" or "mpi"')
    mesh = Mesh(MPI.COMM_WORLD if comm is None else comm)
    opened = open_device(device) if isinstance(device, str) else device
    mover = progress_for(progress, mesh.cores, mesh.world)
    carrier = MessageTransport(mesh.comm, opened, mover, ordered=reduce == "alltoall")
    return Sharded(model, mesh, opened, carrier, mover, prefetch=prefetch, seed=seed, dtype=dtype, ignore_index=ignore_index)
