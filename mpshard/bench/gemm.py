"""`mpshard bench gemm`: the rate of matrix products, alone, on all ranks at once: the ceiling of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard.bench.work import Product
from mpshard.comm import collectives
from mpshard.device import Array, Device

if TYPE_CHECKING:
    from mpi4py import MPI

ENOUGH = 0.15  # seconds spent on each product
AT_LEAST = 3  # runs of each product


def measure(device: Device, comm: MPI.Comm, shapes: Mapping[Product, int], dtype: Any = "float32") -> dict[str, Any]:
    """Time every orientation of every product. Collective.

    Returns `products`, one object each with the GFLOP/s of `forward`, `dx` and `dw`; `gflops`, the rate over all of them,
    each as often as it occurs: the mean over ranks, each with the others busy too.
    """
    rows, flops, seconds = [], 0.0, 0.0
    for product, count in shapes.items():
        took = {name: run_time(device, comm, action) for name, action in orientations(device, product, dtype).items()}
        flops += 3 * count * product.flops
        seconds += count * sum(took.values())
        rows.append({"rows": product.rows, "inner": product.inner, "columns": product.columns, "count": count,
                     **{name: product.flops / time_s / 1e9 for name, time_s in took.items()}})
    mean_seconds = float(collectives.all_reduce(comm, np.array([seconds]))[0]) / comm.size
    return {"gflops": flops / mean_seconds / 1e9, "world_size": comm.size, "products": rows}


def orientations(device: Device, product: Product, dtype: Any) -> dict[str, Callable[[], Array]]:
    """The three products of a linear layer, as the model makes them, on values of ordinary size."""
    def matrix(rows: int, columns: int) -> Array:
        block = device.empty((rows, columns), dtype)
        block[...] = device.from_host(np.random.default_rng(0).standard_normal(columns).astype(dtype))
        return block

    p = product
    x, dy, dx = matrix(p.rows, p.inner), matrix(p.rows, p.columns), matrix(p.rows, p.inner)
    y = matrix(p.rows, p.columns)
    weight = matrix(p.inner, p.columns) if p.stored_in_out else matrix(p.columns, p.inner)
    w = weight if p.stored_in_out else weight.T
    a, b = (x, dy) if p.stored_in_out else (dy, x)
    return {"forward": lambda: device.matmul(x, w, out=y), "dx": lambda: device.matmul(dy, w.T, out=dx),
            "dw": lambda: device.matmul(a.T, b, out=weight)}


def run_time(device: Device, comm: MPI.Comm, action: Callable[[], Any]) -> float:
    """Median seconds of an action on this rank, all ranks running it at the same time; as often on each."""
    def once() -> float:
        start = time.perf_counter()
        action()
        device.synchronise()
        return time.perf_counter() - start

    once()
    comm.Barrier()
    longest = float(collectives.all_max(comm, np.array([once()]))[0])
    runs = max(AT_LEAST, round(ENOUGH / longest))
    comm.Barrier()
    return statistics.median(once() for _ in range(runs))
