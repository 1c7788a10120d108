"""`mpshard bench collectives`: how long a unit's gather and reduce take by each transport, and how much of it hides."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard.comm import collectives, shared
from mpshard.comm.collectives import Pending, progress_for
from mpshard.comm.mesh import Mesh
from mpshard.comm.transport import MessageTransport, Transport
from mpshard.device import Device, Kind
from mpshard.device.blas import set_blas_threads

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes of a full unit
RUNS = 7  # the median of so many is reported
SIDE = 256  # of the matrices that are multiplied meanwhile: 0.3 ms a product on one core


def measure(comm: MPI.Comm, device: Device, sizes: Sequence[int] = SIZES, progress: str = "auto") -> dict[str, Any]:
    """Time gather and reduce of units of `sizes` bytes by every transport that can be had here. Collective.

    A row holds `seconds`, the slowest rank's median; `gb_per_s`, the (world - 1) / world of the unit that a rank must
    receive over that; `hidden_fraction`, how much of the communication, or of the compute if that is shorter, vanishes
    when matrix products run meanwhile: (communication + compute - both) / the shorter.
    """
    mesh = Mesh(comm)
    set_blas_threads(mesh.cores)
    mover = progress_for(progress, mesh.cores, mesh.world, mesh.ranks_on_node)
    problem = shared.fits(mesh.comm, mesh.ranks_on_node, 6 * max(sizes) * mesh.ranks_on_node)
    ways: dict[str, Transport] = {"mpi, reduce-scatter": MessageTransport(mesh.comm, device, mover),
                                  "mpi, all-to-all": MessageTransport(mesh.comm, device, mover, ordered=True)}
    if problem is None:
        ways["shm"] = shared.SharedTransport(mesh.comm, mesh.ranks_on_node, device, mover)
    rows = [{"transport": name, **row} for name, carrier in ways.items()
            for row in _time_way(carrier, mesh, device, mover.poll, sizes)]
    mover.close()
    return {"world_size": mesh.world, "ranks_on_node": mesh.ranks_on_node, "progress": mover.name, "no_shm": problem, "rows": rows}


class Subject:
    """A unit of about `nbytes`, cut over the ranks, and the buffers it travels through."""

    def __init__(self, carrier: Transport, mesh: Mesh, device: Device, nbytes: int) -> None:
        self.carrier, self.share = carrier, math.ceil(nbytes / 4 / mesh.world / 16) * 16  # elements of a slice
        self.size = self.share * mesh.world
        self.store = carrier.store(self.share, np.float32, Kind.PARAMETER)
        self.full = None if carrier.in_place else carrier.slot(self.size, np.float32, Kind.GATHERED)
        self.gradient = carrier.slot(self.size, np.float32, Kind.FULL_GRADIENT)
        self.summed = device.zeros(self.share, np.float32, Kind.GRADIENT)

    def start_gather(self) -> Pending:
        return self.carrier.gather(self.store, self.full)

    def finish_gather(self, pending: Pending) -> None:
        pending.wait()
        self.carrier.release(self.full)

    def start_reduce(self) -> Pending:
        self.gradient.acquire()
        return self.carrier.reduce(self.gradient, self.size, self.summed, False)

    def finish_reduce(self, pending: Pending) -> None:
        pending.wait()


def _time_way(carrier: Transport, mesh: Mesh, device: Device, poll: Callable[[], None],
              sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    for nbytes in sizes:
        unit = Subject(carrier, mesh, device, nbytes)
        for verb, start, finish in (("gather", unit.start_gather, unit.finish_gather), ("reduce", unit.start_reduce, unit.finish_reduce)):
            seconds, hidden = _alone_and_behind(mesh, device, poll, start, finish)
            yield {"collective": verb, "bytes": 4 * unit.size, "seconds": seconds, "hidden_fraction": hidden,
                   "gb_per_s": 4 * unit.share * (mesh.world - 1) / seconds / 1e9}


def _alone_and_behind(mesh: Mesh, device: Device, poll: Callable[[], None], start: Callable[[], Pending],
                      finish: Callable[[Pending], None]) -> tuple[float, float]:
    """Seconds of a communication alone, and the share of it that hides behind matrix products."""
    a, b, out = (device.zeros((SIDE, SIDE), np.float32) for _ in range(3))

    def compute(products: int) -> None:
        for _ in range(products):
            device.matmul(a, b, out=out)
            poll()

    def timed(action: Callable[[], None]) -> float:
        took = []
        for _ in range(RUNS):
            mesh.comm.Barrier()
            begin = time.perf_counter()
            action()
            device.synchronise()
            took.append(time.perf_counter() - begin)
        return float(collectives.all_max(mesh.comm, np.array([statistics.median(took)]))[0])

    def both() -> None:
        pending = start()
        compute(products)
        finish(pending)

    finish(start())  # touches the memory, opens the connections
    alone = timed(lambda: finish(start()))
    one = timed(lambda: compute(8)) / 8
    products = max(1, math.ceil(1.5 * alone / one))
    busy = timed(lambda: compute(products))
    return alone, min(1.0, max(0.0, (alone + busy - timed(both)) / min(alone, busy)))
