"""5. What is in memory before, during and after: the full parameters of a stack of layers over one step.

    mpirun -n 2 python examples/mechanics/05_memory.py

Six layers are sharded. Forward and backward visit them in order; a layer is gathered before its use and freed after
it, and the gathers of the next ones are under way meanwhile (prefetch). Every buffer below goes through a ledger.
"""

import sys
from collections.abc import Callable
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


class Ledger:
    """Bytes allocated, now and at most, by kind of memory."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def allocate(self, kind: str, count: int) -> np.ndarray:
        """(count,) float32, poisoned with NaN: what is read before it is written shows."""
        array = np.full(count, np.nan, np.float32)
        self.now[kind] = self.now.get(kind, 0) + array.nbytes
        self.peak[kind] = max(self.peak.get(kind, 0), self.now[kind])
        return array

    def free(self, kind: str, array: np.ndarray) -> None:
        """Take back. The array is poisoned again, so that a view somebody kept cannot pass for weights."""
        array.fill(np.nan)
        self.now[kind] -= array.nbytes


n_layers, width, samples = 6, 63, 4
count = width * width + width  # a matrix and a bias
shard_size = -(-count // size)
padded = shard_size * size
unit_bytes = 4 * padded


class Layer:
    """x -> tanh(x W + b): one flat vector, of which this rank keeps a slice. Each verb asserts the state it needs."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger, self.state = ledger, "sharded"
        self.shard = ledger.allocate("parameter shards", shard_size)
        whole = np.random.default_rng(seed).standard_normal(count).astype(np.float32) / np.float32(width) ** 0.5
        self.shard[:] = np.pad(whole, (0, padded - count))[rank * shard_size : (rank + 1) * shard_size]
        self.gradient = ledger.allocate("gradient shards", shard_size)
        self.moments = [ledger.allocate("Adam moments", shard_size) for _ in range(2)]  # idle here: see 04

    def gather(self) -> None:
        assert self.state == "sharded"
        self.full = self.ledger.allocate("full parameters", padded)
        self.request = world.Iallgather(self.shard, self.full)
        self.state = "gathering"

    def wait(self) -> None:
        assert self.state == "gathering"
        self.request.Wait()
        self.state = "full"

    def free(self) -> None:
        assert self.state == "full"
        self.ledger.free("full parameters", self.full)
        del self.full
        self.state = "sharded"

    def views(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """W (width, width) and b (width,) as views of a full flat vector, of parameters or of gradients."""
        return flat[: width * width].reshape(width, width), flat[width * width : count]

    def forward(self, x: np.ndarray) -> np.ndarray:
        assert self.state == "full"
        w, b = self.views(self.full)
        return np.tanh(x @ w + b)

    def backward(self, x: np.ndarray, y: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """From input, output and the output's gradient: reduce-scatter the parameters' gradient, return the input's."""
        assert self.state == "full"
        dz = dy * (1 - y * y)
        full_gradient = self.ledger.allocate("full gradients", padded)
        full_gradient[count:] = 0
        dw, db = self.views(full_gradient)
        np.matmul(x.T, dz, out=dw)
        np.sum(dz, axis=0, out=db)
        world.Ireduce_scatter_block(full_gradient, self.gradient).Wait()  # a trainer waits later: see 06
        self.ledger.free("full gradients", full_gradient)
        return dz @ self.views(self.full)[0].T


marks = {"sharded": "·", "gathering": "░", "full": "█"}


def step(prefetch: int) -> tuple[Ledger, list[str], bytes]:
    """One forward and backward; returns the ledger, a picture line per event, and all gradient shards' bits."""
    ledger, picture = Ledger(), []
    layers = [Layer(ledger, seed) for seed in range(n_layers)]

    def note(event: str) -> None:
        now = ledger.now.get("full parameters", 0)
        picture.append(f"  {event:12} {' '.join(marks[layer.state] for layer in layers)} {now:8}")

    def visit(order: list[int], event: str, use: Callable[[int], object], keep_last: bool) -> None:
        """Gather ahead, use and free the layers in this order."""
        for place, index in enumerate(order):
            for ahead in order[place : place + prefetch + 1]:
                if layers[ahead].state == "sharded":
                    layers[ahead].gather()
                    note(f"gather {ahead}")
            if layers[index].state == "gathering":
                layers[index].wait()
            use(index)
            note(f"{event} {index}")
            if not (keep_last and place == len(order) - 1):
                layers[index].free()
                note(f"free {index}")

    # Activations are kept from forward to backward; weights are not.
    activations = [np.random.default_rng(rank).standard_normal((samples, width)).astype(np.float32)]
    gradients = [np.ones((samples, width), np.float32)]  # the loss is the sum of the last layer's outputs

    def forward(i: int) -> None:
        activations.append(layers[i].forward(activations[i]))

    def backward(i: int) -> None:
        gradients.append(layers[i].backward(activations[i], activations[i + 1], gradients[-1]))

    note("before")
    before = dict(ledger.now)
    visit(list(range(n_layers)), "forward", forward, keep_last=True)  # its backward comes next: the last stays full
    visit(list(reversed(range(n_layers))), "backward", backward, keep_last=False)
    note("after")
    left = {kind: n for kind, n in ledger.now.items() if n}
    assert left == before, f"after the step {left}, before it {before}"
    bits = b"".join(layer.gradient.tobytes() for layer in layers)
    assert all(np.isfinite(layer.gradient).all() for layer in layers)  # no poison was read
    return ledger, picture, bits


# --- The picture. Time runs down; a column is a layer. ---------------------------------------------------------------
ledger, picture, bits = step(prefetch=1)
say(f"{n_layers} layers of {count} parameters on {size} rank(s): full {unit_bytes} bytes, a shard {4 * shard_size}", "")
say("One step, prefetch 1:   · sharded   ░ being gathered   █ full", "")
say(f"  {'event':12} {' '.join(str(i) for i in range(n_layers))}   full bytes", *picture, "")

# --- Claim: the peak of full parameters is (prefetch + 1) layers, however many there are; the result is the same. ----
say("Peak of full parameters")
for prefetch in (0, 1, 2, n_layers - 1):
    other, _, other_bits = step(prefetch)
    peak = other.peak["full parameters"]
    say(f"  prefetch {prefetch}: {peak:7} bytes = {peak // unit_bytes} layer(s)  {'█' * (peak // unit_bytes)}")
    assert peak == (prefetch + 1) * unit_bytes
    assert other.peak["full gradients"] == unit_bytes  # one at a time
    assert other_bits == bits  # prefetch changes nothing, bit for bit
say("")

# --- What stays between steps is slices only. ------------------------------------------------------------------------
parameters = n_layers * padded
say("Bytes on a rank          between steps   at most")
for kind, peak in ledger.peak.items():
    say(f"  {kind:20}  {ledger.now[kind]:14}  {peak:8}")
assert sum(ledger.now.values()) == 16 * parameters // size  # parameter, gradient, two moments; 4 bytes each
say("")


# --- The ZeRO table (Rajbhandari et al. 2020, section 5; here all in float32, 16 bytes a parameter). -----------------
def zero_table(total: int, layer: int, ranks: int) -> list[tuple[str, int, int, int]]:
    """Bytes at most on a rank: (stage, parameters, gradients, moments), for `total` parameters, `layer` in a layer.

    At stages 2 and 3 one full gradient is in flight, at stage 3 two layers are gathered (prefetch 1).
    """
    return [
        ("0 nothing sharded", 4 * total, 4 * total, 8 * total),
        ("1 moments", 4 * total, 4 * total, 8 * total // ranks),
        ("2 and gradients", 4 * total, 4 * total // ranks + 4 * layer, 8 * total // ranks),
        ("3 and parameters", 4 * total // ranks + 8 * layer, 4 * total // ranks + 4 * layer, 8 * total // ranks),
    ]


def show(title: str, table: list[tuple[str, int, int, int]], unit: float) -> None:
    say(title, "  ZeRO stage, sharded  parameters  gradients    moments   together")
    for name, *parts in table:
        numbers = "".join(f"{part / unit:11.1f}" for part in [*parts, sum(parts)])
        say(f"  {name:20}{numbers}  {'█' * round(40 * sum(parts) / sum(table[0][1:]))}")


here = zero_table(parameters, padded, size)
assert sum(here[3][1:]) == sum(ledger.peak.values())  # the formula is what the ledger saw
show(f"At most on each of {size} rank(s), KB", here, 1e3)
say("Buffers come in whole layers, which six layers on few ranks feel. Usual sizes, by the same formula:", "")
show("A billion parameters in 24 layers on 16 ranks, GB", zero_table(10**9, 10**9 // 24, 16), 1e9)
say(f"ok on {size} rank(s)")
