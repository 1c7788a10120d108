"""1. Shard a matrix, and put it together again in place.

    mpirun -n 2 python examples/mechanics/01_shard.py

Three parameters lie one behind the other in one flat vector. The vector is padded until the ranks divide it, and every
rank keeps one contiguous slice: its shard. One all-gather makes the whole vector again, and the parameters are views
of it, so nothing is copied in or out. Everything that sharded training does to weights is built on this.
"""

import math
import sys
from types import TracebackType

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size


def end_the_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback, then end all ranks: otherwise the others wait for this one for ever."""
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    world.Abort(1)


sys.excepthook = end_the_job  # `python -m mpi4py script.py` does the same without these lines


def say(*lines: str) -> None:
    """Print on rank 0 only."""
    if rank == 0:
        print(*lines, sep="\n", flush=True)


# --- The layout: sizes and ranks in, offsets out. Pure arithmetic, the same on every rank, no MPI. -------------------
shapes: dict[str, tuple[int, ...]] = {"weight": (5, 7), "bias": (5,), "scale": ()}
sizes = {name: math.prod(shape) for name, shape in shapes.items()}  # the product of no factors is 1: a scalar
total = sum(sizes.values())
shard_size = -(-total // size)  # divided, rounded up
padded = shard_size * size


def segments(owner: int) -> list[tuple[str, int, int, int, int]]:
    """The pieces of parameters in one rank's shard: (name, start and stop in the parameter, then in the shard).

    A cut may fall anywhere, in the middle of a matrix row too: the table is what keeps each parameter's identity.
    """
    table, begin = [], 0  # `begin`: where the parameter starts in the flat vector
    for name, count in sizes.items():
        start = max(begin, owner * shard_size)
        stop = min(begin + count, (owner + 1) * shard_size)
        if start < stop:
            table.append((name, start - begin, stop - begin, start - owner * shard_size, stop - owner * shard_size))
        begin += count
    return table


def initial(name: str, start: int, stop: int) -> np.ndarray:
    """Elements start..stop of a parameter: a function of name and element alone, never of the rank that asks."""
    return np.arange(start, stop, dtype=np.float32) + {"weight": 0, "bias": 100, "scale": 200}[name]


# --- Each rank allocates and fills its own slice. Nobody ever needs room for the whole to begin with. ----------------
shard = np.zeros(shard_size, np.float32)  # what no segment names is padding, and stays zero
for name, p0, p1, s0, s1 in segments(rank):
    shard[s0:s1] = initial(name, p0, p1)

pictures = world.gather("".join(name[0] * (s1 - s0) for name, _, _, s0, s1 in segments(rank)).ljust(shard_size, "."))
tables = world.gather(segments(rank))
if pictures is not None and tables is not None:  # rank 0: ranks' texts arrive in rank order
    say(f"{total} elements on {size} rank(s): padded to {padded}, {shard_size} each ({shard.nbytes} bytes)")
    say("w = weight (5, 7), b = bias (5,), s = scale (), . = padding", "")
    say(*(f"  rank {r} |{picture}|" for r, picture in enumerate(pictures)), "")
    say("The segment table", "  rank  parameter  elements of it  place in the shard")
    for r, table in enumerate(tables):
        say(*(f"  {r:4}  {name:9}  [{p0:3}:{p1:3} )     [{s0:3}:{s1:3} )" for name, p0, p1, s0, s1 in table))
    covered = [(name, i) for table in tables for name, p0, p1, _, _ in table for i in range(p0, p1)]
    assert covered == [(name, i) for name in sizes for i in range(sizes[name])]  # each element once, in order

# --- Way one: separate buffers. MPI_Iallgather, MPI 4.1 section 6.12.5 (blocking: 6.7). ------------------------------
# (Sections are those of the standard's PDF; its HTML edition counts chapters one higher.)
# The call returns at once and the data move later. Until Wait, the shard must not be written and `full` not be read.
full = np.full(padded, np.nan, np.float32)
request = world.Iallgather(shard, full)
request.Wait()

# --- Way two: MPI_IN_PLACE. Each rank's contribution already lies at its own place in the receive buffer. ------------
# It saves one copy of the shard. It suits a vector that stays whole (ZeRO-1 and 2, where every rank keeps the full
# parameters and updates its own slice of them). A trainer that frees the whole after each use keeps shards apart.
whole = np.full(padded, np.nan, np.float32)
mine = whole[rank * shard_size : (rank + 1) * shard_size]  # a view
mine[:] = shard
world.Iallgather(MPI.IN_PLACE, whole).Wait()
assert np.array_equal(full, whole)

say("", "All-gather: bytes from each rank (row) to each rank (column)")
say("  from\\to" + "".join(f"{r:7}" for r in range(size)))
for sender in range(size):
    say(f"  {sender:7}" + "".join(f"{'own' if sender == to else shard.nbytes:>7}" for to in range(size)))
say(f"  every rank receives {(size - 1) * shard.nbytes} bytes and then holds all {full.nbytes}")

# --- The parameters are views of the gathered vector: no copy out. ---------------------------------------------------
parameters, begin = {}, 0
for name, count in sizes.items():
    parameters[name] = full[begin : begin + count].reshape(shapes[name])
    begin += count
for name, parameter in parameters.items():
    assert parameter.shape == shapes[name]
    assert np.shares_memory(parameter, full)
    assert np.array_equal(parameter.ravel(), initial(name, 0, sizes[name]))
assert not full[total:].any()  # padding is zero
say("", "weight, a view of the gathered vector:", str(parameters["weight"]))

# --- Freeing. The other side of views: whoever still holds one reads what comes next in that memory. -----------------
# A trainer reuses the buffer for the next layer, so a view must never outlive its use. Poison shows who forgot.
full.fill(np.nan)
assert np.isnan(parameters["weight"]).all()
say("", "After freeing (the buffer is poisoned with NaN) weight[0, 0] reads " + str(parameters["weight"][0, 0]))
say(f"ok on {size} rank(s)")
