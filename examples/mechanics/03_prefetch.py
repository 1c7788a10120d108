"""3. Start the next layer's gather behind this layer's product, and measure what hid.

    mpirun -n 2 python examples/mechanics/03_prefetch.py

A nonblocking call promises only that it returns at once, not that anything moves while you compute: MPI may do its
work only while you are inside some MPI call ("Progress", MPI 4.1 section 2.9). So poll: call Test now and then.

Expect little on one busy machine. There, a message is a copy by the same cores that compute, and no schedule hides
work that the processor itself must do. Over a network the card moves the data, and polling hides nearly all of it.
"""

import os
import sys
from collections.abc import Callable
from types import TracebackType

# One BLAS thread a rank, set before NumPy loads: otherwise each rank's library takes all cores, and they fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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


# --- This layer's product, in chunks of rows of about a millisecond; the next layer's weights, sharded. --------------
rows, width, chunk = 768, 512, 64
random = np.random.default_rng(0)
x = random.standard_normal((rows, width), np.float32)
weight = random.standard_normal((width, width), np.float32)
y = np.empty((rows, width), np.float32)

shard_size = 3_000_000 // size
shard = np.full(shard_size, rank + 1, np.float32)
next_layer = np.empty(shard_size * size, np.float32)


def product(between_chunks: Callable[[], object]) -> None:
    """y = x @ weight, chunk by chunk, with a call between chunks."""
    for start in range(0, rows, chunk):
        np.matmul(x[start : start + chunk], weight, out=y[start : start + chunk])
        between_chunks()


# --- Four ways to run. -----------------------------------------------------------------------------------------------
def only_product() -> None:
    product(between_chunks=lambda: None)


def only_gather() -> None:
    world.Iallgather(shard, next_layer).Wait()


def start_then_wait() -> None:
    """Start the gather, compute without looking back, then wait."""
    request = world.Iallgather(shard, next_layer)
    product(between_chunks=lambda: None)
    request.Wait()


def start_and_poll() -> None:
    """The same, with MPI_Test (section 3.7.3) between chunks: each call lets MPI move the gather on by a step."""
    request = world.Iallgather(shard, next_layer)
    product(between_chunks=request.Test)
    request.Wait()


def milliseconds(run: Callable[[], None], repeats: int = 7) -> float:
    """The median time of a run, each time the slowest rank's: a step ends when the last rank does."""
    times = []
    for repeat in range(repeats + 1):
        y.fill(np.nan)
        next_layer.fill(np.nan)
        world.Barrier()
        start = MPI.Wtime()
        run()
        elapsed = world.allreduce(MPI.Wtime() - start, op=MPI.MAX)
        if repeat:  # the first one warms up
            times.append(1000 * elapsed)
        if run is not only_gather:
            assert np.array_equal(y, x_times_weight)  # the gather behind it does not touch the product ...
        if run is not only_product:
            assert (next_layer.reshape(size, shard_size) == everyones_mark).all()  # ... and is all there
    return float(np.median(times))


product(between_chunks=lambda: None)
x_times_weight = y.copy()
assert np.allclose(x_times_weight, x @ weight, rtol=1e-4, atol=1e-3)
everyones_mark = np.arange(1, size + 1, dtype=np.float32)[:, None]  # rank r's shard is full of r + 1

compute = milliseconds(only_product)
gather = milliseconds(only_gather)
waited = milliseconds(start_then_wait)
polled = milliseconds(start_and_poll)

# --- What hid: the time saved against one after the other, as a share of the most that could be saved. ---------------
received = (size - 1) * shard.nbytes


def hidden(both: float) -> str:
    """(compute + gather - both) / min(compute, gather) in percent; noise can push it below 0 or above 100."""
    share = (compute + gather - both) / min(compute, gather)
    return f"{100 * share:4.0f} % hidden" if size > 1 else "(nothing to send)"


def bar(ms: float, mark: str) -> str:
    return mark * max(1, round(40 * ms / (compute + gather)))


megaflop = 2 * rows * width * width // 10**6
say(f"{size} rank(s): each receives {received} bytes behind a product of {megaflop} million operations", "")
say(f"  product alone            {compute:7.2f} ms  {bar(compute, 'p')}")
say(f"  gather alone             {gather:7.2f} ms  {bar(gather, 'g')}")
say(f"  one after the other      {compute + gather:7.2f} ms  {bar(compute, 'p')}{bar(gather, 'g')}")
say(f"  gather behind, Wait      {waited:7.2f} ms  {bar(waited, '#')}  {hidden(waited)}")
say(f"  gather behind, Test      {polled:7.2f} ms  {bar(polled, '#')}  {hidden(polled)}", "")
say("These are measurements and differ from run to run; what was computed and gathered is the same in all ways.")
say("Inside one machine with every core computing, the copy is the processor's own work: expect about 0 %,")
say("or less, as the two also compete for caches and memory. Between machines, Test hides most of a gather.")
say(f"ok on {size} rank(s)")
