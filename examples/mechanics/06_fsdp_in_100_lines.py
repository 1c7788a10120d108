"""6. Fully sharded data parallel training, all of it, in 100 lines of code.

    mpirun -n 2 python examples/mechanics/06_fsdp_in_100_lines.py

A small language model reads eight bytes of this file and predicts the ninth. Its four units (embedding, two blocks,
head) are flat padded vectors. Each rank keeps 1/N of the parameters, gradients and Adam moments; a unit is whole only
while it computes, and the next one's gather and the last one's reduce run meanwhile (01 to 05 take these steps one by
one). 1, 2, 3 and 4 ranks print the same curve.
"""

import math
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one BLAS thread a rank, or they fight over cores: before NumPy loads
import numpy as np
from mpi4py.MPI import COMM_WORLD as world

rank, size = world.rank, world.size
Arrays = dict[str, np.ndarray]
nothing = np.empty(0)

# An exception on one rank ends all of them: otherwise the others wait for it for ever.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), world.Abort(1))


# --- The model. Forward makes the output from parameters p and input x. Backward is also given dy, the gradient of ----
# --- the output; it fills g, the gradients of the parameters, and returns the gradient of the input. -----------------
def embed(p: Arrays, x: np.ndarray) -> np.ndarray:  # (n, 8) bytes -> (n, 8 * 8)
    return p["table"][x].reshape(len(x), -1)


def embed_backward(p: Arrays, g: Arrays, x: np.ndarray, dy: np.ndarray) -> None:  # bytes have no gradient
    np.add.at(g["table"], x, dy.reshape(*x.shape, -1))


def block(p: Arrays, x: np.ndarray) -> np.ndarray:  # (n, 64) -> (n, 64)
    return x + np.tanh(x @ p["w"] + p["b"])


def block_backward(p: Arrays, g: Arrays, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    dz = dy * (1 - np.tanh(x @ p["w"] + p["b"]) ** 2)  # made again from x: one array less to keep
    g["w"][:], g["b"][:] = x.T @ dz, dz.sum(axis=0)
    return dy + dz @ p["w"].T


def head(p: Arrays, x: np.ndarray) -> np.ndarray:  # (n, 64) -> logits (n, 256)
    return x @ p["w"]


def head_backward(p: Arrays, g: Arrays, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    g["w"][:] = x.T @ dy
    return dy @ p["w"].T


# --- A unit: one flat vector of named parameters, of which this rank owns one contiguous slice. ----------------------
class Unit:
    # float64: sums over ranks round differently for each N, and this keeps that far below the digits printed.
    def __init__(self, seed: int, forward: Callable, backward: Callable, **shapes: tuple[int, ...]) -> None:
        self.forward, self.backward, self.shapes = forward, backward, shapes
        self.ends = np.cumsum([math.prod(shape) for shape in shapes.values()])  # where each parameter ends
        self.k = -(-self.ends[-1] // size)  # elements in a shard
        whole = np.random.default_rng(seed).normal(0, 0.1, (size, self.k))  # drawn in order: the same for every N
        self.shard = whole[rank].copy()
        self.gradient, self.m, self.v = np.zeros((3, self.k))
        self.full = self.sending = nothing

    def views(self, flat: np.ndarray) -> Arrays:  # split() makes views; its last part is the padding, which zip() drops
        parts = zip(self.shapes.items(), np.split(flat, self.ends), strict=False)
        return {name: part.reshape(shape) for (name, shape), part in parts}

    def gather(self) -> None:  # starts; parameters() waits
        self.full = np.empty(self.k * size)
        self.gathering = world.Iallgather(self.shard, self.full)

    def parameters(self) -> Arrays:
        self.gathering.Wait()
        return self.views(self.full)

    def free(self) -> None:
        self.full.fill(np.nan)  # a view used by mistake from here on would spoil the loss at once
        self.full = nothing

    def reduce(self, full_gradient: np.ndarray) -> None:  # starts; adam() waits
        self.sending = full_gradient  # MPI reads it until then
        self.reducing = world.Ireduce_scatter_block(self.sending, self.gradient)

    def adam(self, t: int, lr: float) -> None:
        self.reducing.Wait()
        self.sending = nothing
        self.m += 0.1 * (self.gradient - self.m)
        self.v += 0.05 * (self.gradient**2 - self.v)
        self.shard -= lr * (self.m / (1 - 0.9**t)) / (np.sqrt(self.v / (1 - 0.95**t)) + 1e-8)


# --- One step: this rank's share x, y of a batch of `tokens` over all ranks. Returns the mean loss of them all. ------
def step(units: list[Unit], x: np.ndarray, y: np.ndarray, tokens: int, t: int, lr: float) -> float:
    last, inputs, row = len(units) - 1, [], np.arange(len(y))
    units[0].gather()
    for i, unit in enumerate(units):
        if i < last:
            units[i + 1].gather()  # moves behind this forward
        inputs.append(x)
        x = unit.forward(unit.parameters(), x)
        if i < last:
            unit.free()  # but the last one's backward comes next: it stays
    x = np.exp(x - x.max(axis=1, keepdims=True))
    x /= x.sum(axis=1, keepdims=True)  # logits -> probabilities
    loss = world.allreduce(-np.log(x[row, y]).sum()) / tokens  # sum over all ranks / tokens of all ranks
    x[row, y] -= 1
    dy = x / tokens  # that mean's gradient: with it, a plain sum over ranks is the whole gradient
    for i in reversed(range(len(units))):
        if i > 0:
            units[i - 1].gather()  # moves behind this backward
        g = np.zeros(units[i].k * size)
        dy = units[i].backward(units[i].parameters(), units[i].views(g), inputs.pop(), dy)
        assert sum(unit.full is not nothing for unit in units) <= 2  # this one and the next, however many there are
        units[i].free()
        units[i].reduce(g)
        if i < last:
            units[i + 1].adam(t, lr)  # its reduce has had this backward to hide behind
    units[0].adam(t, lr)
    return loss


# --- Train on this file. The batch is global: 12 pieces of text, a function of the step alone. -----------------------
steps, batch, length = 96, 12, 48
assert batch % size == 0, f"{batch} sequences do not divide by {size} ranks; run 1, 2, 3, 4, 6 or 12"
units = [Unit(0, embed, embed_backward, table=(256, 8)), Unit(3, head, head_backward, w=(64, 256))]
units[1:1] = [Unit(seed, block, block_backward, w=(64, 64), b=(64,)) for seed in (1, 2)]  # between these two
windows = np.lib.stride_tricks.sliding_window_view(np.fromfile(__file__, np.uint8), 9)
losses = []
for t in range(1, steps + 1):
    starts = np.random.default_rng(t).integers(0, len(windows) - length, (size, batch // size))
    text = np.concatenate([windows[start : start + length] for start in starts[rank]])
    losses.append(step(units, text[:, :8], text[:, 8], batch * length, t, lr=0.02))
    if rank == 0 and (t == 1 or t % 8 == 0):
        print(f"step {t:3}  loss {losses[-1]:.8f}  {'█' * round(10 * losses[-1])}", flush=True)
shard = sum(unit.shard.nbytes for unit in units)
sent = (size - 1) * (3 * shard - units[-1].shard.nbytes)  # 2 gathers and 1 reduce a unit, but 1 gather of the head
if rank == 0:
    print(f"a rank keeps {4 * shard} bytes of {4 * shard * size} between steps, and sends {sent} in each")
assert np.mean(losses[-8:]) < losses[0] / 2, "the loss did not fall"
