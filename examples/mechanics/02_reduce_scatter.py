"""2. Reduce-scatter a gradient, in two ways, and see why the order of a sum matters.

    mpirun -n 2 python examples/mechanics/02_reduce_scatter.py

After backward every rank holds a full gradient, of its own part of the batch. What a rank needs is one slice of the
sum over all ranks: the slice that belongs to its shard. That is a reduce-scatter, the mirror image of the all-gather.
"""

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


sys.excepthook = end_the_job


def say(*lines: str) -> None:
    """Print on rank 0 only."""
    if rank == 0:
        print(*lines, sep="\n", flush=True)


shard_size = 5000
mine = slice(rank * shard_size, (rank + 1) * shard_size)


def made_up_gradient(seed: int, count: int) -> np.ndarray:
    """What some backward might leave, (count,) float32; magnitudes vary widely, as those of gradients do."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(count) * 10.0 ** random.uniform(-3, 3, count)).astype(np.float32)


gradient = made_up_gradient(rank, size * shard_size)
everyone = np.stack([made_up_gradient(r, size * shard_size) for r in range(size)])  # only to check the sums below
exact = everyone[:, mine].astype(np.float64).sum(axis=0)

say(f"A gradient of {gradient.size} float32 on each of {size} rank(s); a shard is {shard_size}", "")
say("          shard " + "  ".join(f"{r}   " for r in range(size)))
say(*(f"  rank {r}      " + "  ".join(f"g{r}.{s}" for s in range(size)) for r in range(size)))
say("  sum         " + "  ".join("  | " for _ in range(size)))
say("  lands on     " + "  ".join(f" r{s} " for s in range(size)), "")

# --- Way one: MPI does the sum. MPI_Ireduce_scatter_block, MPI 4.1 section 6.12.9 (blocking: 6.10.1). ----------------
# "Block" is the variant in which every rank gets equally much; padding has seen to that.
by_mpi = np.empty(shard_size, np.float32)
world.Ireduce_scatter_block(gradient, by_mpi, op=MPI.SUM).Wait()

# A float32 sum of n numbers in any order is off by at most (n - 1) u times the sum of their magnitudes, u = 2^-24
# (Higham, Accuracy and Stability of Numerical Algorithms, eq. 4.4 to first order). Twice that is a safe bound.
bound = 2 * (size - 1) * 2.0**-24 * np.abs(everyone[:, mine]).astype(np.float64).sum(axis=0)
assert (np.abs(by_mpi - exact) <= bound).all()
say("Way one, Ireduce_scatter_block: within the rounding bound of the float64 sum")

# --- Way two: move first, add here. MPI_Ialltoall, section 6.12.6, then a sum in the order of ranks. -----------------
# Slice s of every gradient goes to rank s, which then holds `size` pieces of its own shard and adds them up.
pieces = np.empty((size, shard_size), np.float32)
world.Ialltoall(gradient, pieces).Wait()
ordered = pieces[0].copy()
for piece in pieces[1:]:
    ordered += piece

expected = everyone[0].copy()
for other in everyone[1:]:
    expected += other
assert ordered.tobytes() == expected[mine].tobytes()  # bit for bit: the order is ours
other_bits = world.allreduce(int((by_mpi != ordered).sum()))
say("Way two, Ialltoall + a local sum: bit for bit the sum in rank order")
say(f"  elements in which the two ways differ in their last bits: {other_bits} of {gradient.size}", "")

# --- Bytes. ----------------------------------------------------------------------------------------------------------
piece = shard_size * gradient.itemsize
say("Bytes a rank sends")
say(f"  reduce-scatter as a ring        {(size - 1) * piece:8}   (N-1) shards: the least possible")
say(f"  all-to-all                      {(size - 1) * piece:8}   the same")
say(f"  all-to-all in bfloat16          {(size - 1) * piece // 2:8}   half: MPI only moves it, the float32 sum is ours")
say(f"  all-reduce as a ring            {2 * (size - 1) * piece:8}   twice: everybody gets every slice of the sum")
say(f"  the price of way two: room for N pieces, {pieces.nbytes} bytes", "")

# --- Why order matters: a float sum is commutative but not associative. ----------------------------------------------
# The standard only recommends that a reduction repeat its own result for the same arguments (section 6.9.1), and an
# algorithm may change with the size of the message, the number of ranks and their places.
big, one = np.float32(1e8), np.float32(1)
assert (big + one) - big == 0 and (big - big) + one == 1
say("In float32 (1e8 + 1) - 1e8 = 0 but (1e8 - 1e8) + 1 = 1.")
say("Two ranks cannot disagree (a + b = b + a); from three on, the order shows.", "")

# Worse, the number of ranks itself changes the order. Eight micro-batches, added on each rank and then over ranks:
micro_batches = [made_up_gradient(100 + m, shard_size) for m in range(8)]


def left_to_right(parts: list[np.ndarray]) -> np.ndarray:
    """((g0 + g1) + g2) + ..."""
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def tree(parts: list[np.ndarray]) -> np.ndarray:
    """((g0 + g1) + (g2 + g3)) + ...: neighbours first, as in a knock-out tournament; a power of two of parts."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


say("Eight micro-batches on 1, 2, 4 ranks: elements whose bits differ from one rank's")
for name, add in (("left to right", left_to_right), ("binary tree", tree)):
    counts = []
    for ranks in (1, 2, 4):
        each = 8 // ranks
        sums = [add(micro_batches[r * each : (r + 1) * each]) for r in range(ranks)]  # first on each rank ...
        counts.append(int((add(sums) != add(micro_batches)).sum()))  # ... then over ranks
    say(f"  {name:14}" + "".join(f"{count:7}" for count in counts) + f"   of {shard_size}")
    assert counts[0] == 0 and (sum(counts) == 0) == (add is tree)
say("A rank's share is a whole branch of the tree, so the tree is the same for every number of ranks.")
say(f"ok on {size} rank(s)")
