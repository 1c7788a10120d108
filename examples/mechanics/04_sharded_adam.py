"""4. Sharded Adam equals full Adam, bit for bit, with 1/N of its memory.

    mpirun -n 2 python examples/mechanics/04_sharded_adam.py

Adam treats each element by itself: it never looks at a neighbour. So a rank can update its slice of the parameters
knowing only its slice of the gradient and of the two moments, and need not store anything else.
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


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) with decoupled decay (Loshchilov and Hutter 2019), in place, float32.

    It is given an array and updates that array. It does not know whether this is all of the parameters or a slice.
    """

    def __init__(self, parameters: np.ndarray, lr: float = 1e-2, decay: float = 0.1) -> None:
        self.parameters, self.lr, self.decay, self.steps = parameters, lr, decay, 0
        self.m, self.v = np.zeros_like(parameters), np.zeros_like(parameters)

    def step(self, gradient: np.ndarray, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.steps += 1
        self.m += (1 - beta1) * (gradient - self.m)
        self.v += (1 - beta2) * (gradient * gradient - self.v)
        m_hat = self.m / (1 - beta1**self.steps)
        v_hat = self.v / (1 - beta2**self.steps)
        self.parameters -= self.lr * (m_hat / (np.sqrt(v_hat) + eps) + self.decay * self.parameters)


# --- The task: parameters w are pulled towards the mean of targets, and each rank sees only its own target. ----------
# Loss of rank r: |w - target_r|^2 / 2 summed over elements, so its gradient is w - target_r.
total = 10_001  # does not divide by 2, 3 or 4
shard_size = -(-total // size)
padded = shard_size * size
mine = slice(rank * shard_size, (rank + 1) * shard_size)


def made_up(seed: int) -> np.ndarray:
    """(padded,) float32; the same elements for every padding, zeros behind them."""
    return np.pad(np.random.default_rng(seed).standard_normal(total).astype(np.float32), (0, padded - total))


targets = [made_up(1 + r) for r in range(size)]

# Full Adam: every rank has all of everything (what data parallel training without sharding does).
full = made_up(0)
full_adam = Adam(full)

# Sharded Adam: this rank's slice, copied so that nothing is shared with the above.
shard = made_up(0)[mine].copy()
shard_adam = Adam(shard)

gathered = np.empty(padded, np.float32)
pieces = np.empty((size, shard_size), np.float32)
say(f"{total} parameters on {size} rank(s), {shard_size} each", "", "  step   mean |gradient|   elements that differ")
for step in range(1, 21):
    # Full: the sum of all gradients in the order of ranks, on every rank.
    gradient = full - targets[0]
    for target in targets[1:]:
        gradient += full - target
    full_adam.step(gradient)

    # Sharded: gather the parameters, make this rank's gradient, move slices to their owners, add in the order of ranks.
    world.Allgather(shard, gathered)
    world.Alltoall(gathered - targets[rank], pieces)
    slice_of_sum = pieces[0].copy()
    for piece in pieces[1:]:
        slice_of_sum += piece
    shard_adam.step(slice_of_sum)

    # Any difference, in any bit, of parameters and both moments.
    pairs = [(shard, full), (shard_adam.m, full_adam.m), (shard_adam.v, full_adam.v)]
    differ = world.allreduce(sum(int((a.view(np.uint32) != b[mine].view(np.uint32)).sum()) for a, b in pairs))
    if step == 1 or step % 5 == 0:
        say(f"  {step:4}   {np.abs(gradient).mean():15.6f}   {differ:20}")
    assert differ == 0

# --- What each rank stores from step to step. ------------------------------------------------------------------------
full_bytes = full.nbytes + full_adam.m.nbytes + full_adam.v.nbytes
shard_bytes = shard.nbytes + shard_adam.m.nbytes + shard_adam.v.nbytes
assert shard_bytes * size == full_bytes
say("", "Bytes a rank stores           full   sharded")
for name, a, b in (("parameters", full, shard), ("first moment", full_adam.m, shard_adam.m)):
    say(f"  {name:22}  {a.nbytes:8}  {b.nbytes:8}")
say(f"  second moment           {full_adam.v.nbytes:8}  {shard_adam.v.nbytes:8}")
say(f"  together                {full_bytes:8}  {shard_bytes:8}   1/{size}", "")
say(f"  full     |{'█' * 60}|", *(f"  rank {r}   |{'█' * (60 // size):60}|" for r in range(size)), "")

# --- The one thing that is not element by element: the norm of the gradient, for clipping. ---------------------------
# Squares are summed on each rank and then over ranks (padding adds zeros), so that one number is equal on every rank,
# but the order of its sum, and so its last bits, depend on N. Sum it in float64 and the difference is of no account.
square = world.allreduce(float(np.sum(slice_of_sum.astype(np.float64) ** 2)))
norm = float(np.sqrt(square))
assert np.isclose(norm, np.linalg.norm(gradient.astype(np.float64)), rtol=1e-12)
assert len(set(world.allgather(norm))) == 1
say(f"The global gradient norm, from slices: {norm:.9f}, the same number on every rank")
say(f"ok on {size} rank(s)")
