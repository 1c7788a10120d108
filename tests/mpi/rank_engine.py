"""A real step does what its program says, in messages, bytes and memory, and refuses what would hang or go wrong.

What "one rank" gives is computed beside, by every rank alone on COMM_SELF, so no number is handed from run to run.
"""

from __future__ import annotations

import gc
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from mpshard import train
from mpshard.autograd import Parameter, Tape, Tensor, ops
from mpshard.comm import collectives
from mpshard.data import Batches
from mpshard.device import Kind
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import MicroBatch, Model, Module, Normal
from mpshard.nn.init import fill
from mpshard.optim import AdamW
from mpshard.shard import shard
from mpshard.shard.layout import ALIGN
from mpshard.shard.schedule import Gather, Reduce, training_program
from tests.where import STAND_IN, here, on_numpy

RANKS = (1, 2, 3, 4)
ON_STAND_IN = (2,)
TIMEOUT = 240
V, D, T = 101, 26, 9  # uneven on purpose
WAYS = ([{"transport": "mpi"}, {"transport": "staged"}] if STAND_IN else
        [{"transport": "mpi", "reduce": "mpi"}, {"transport": "mpi", "reduce": "alltoall"}, {"transport": "shm"}])
ways = pytest.mark.parametrize("way", WAYS, ids=["mpi", "staged"] if STAND_IN else ["mpi", "alltoall", "shm"])


def small_gpt2(**options: Any) -> Model:
    return gpt2(GPT2Config(V, T, n_layers=2, d_model=D, n_heads=2, **options))


def small_llama(**options: Any) -> Model:
    return llama(LlamaConfig(V, T, n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_ff=20, **options))


def sharded_on(comm: Any, model: Model, **options: Any) -> Any:
    return shard(model, comm, **{**here(), **options})


def tokens(sequences: int, t: int = T, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), both (sequences, t); sequences of uneven length: the rest does not count."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, V, (sequences, t + 1))
    targets = ids[:, 1:].copy()
    for row, length in zip(targets, random.integers(0, t + 1, sequences), strict=True):
        row[length:] = -100
    return ids[:, :-1], targets


def deal(batch: tuple[np.ndarray, np.ndarray], micro: int, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's micro-batches: number m is the global one m * world + rank."""
    inputs, targets = (part.reshape(-1, world, micro, part.shape[-1])[:, rank] for part in batch)
    return inputs, targets


# -- messages ---------------------------------------------------------------------------------
class Recorder:
    """A communicator that notes each nonblocking collective and the bytes this rank sends others or receives."""

    def __init__(self, comm: Any, calls: Counter, nbytes: Counter) -> None:
        self.comm, self.calls, self.bytes = comm, calls, nbytes

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.comm, name)
        if not name.startswith("I") or not callable(attribute):
            return attribute

        def noting(send: Any, recv: Any, *args: Any, **options: Any) -> Any:
            whole = max((spec[0] if isinstance(spec, list) else spec).nbytes for spec in (send, recv))
            self.calls[name] += 1
            self.bytes[name] += whole // self.comm.size * (self.comm.size - 1)
            return attribute(send, recv, *args, **options)

        return noting


def record(transport: Any) -> tuple[Counter, Counter]:
    """Of all that the transport sends from now on: calls and bytes, by name."""
    calls, nbytes = Counter(), Counter()
    for name in ("gathers", "reduces") if STAND_IN else ("comm",):
        setattr(transport, name, Recorder(getattr(transport, name), calls, nbytes))
    return calls, nbytes


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("reduce", ["alltoall"] if STAND_IN else ["mpi", "alltoall"])
def test_the_collectives_of_a_step_are_the_programs(comm, prefetch, micro_batches, reduce):
    sharded = sharded_on(comm, small_llama(), prefetch=prefetch, transport="mpi", reduce=reduce)
    calls, nbytes = record(sharded.transport)
    batch = tokens(micro_batches * comm.size)
    output = sharded.step(deal(batch, 1, comm.rank, comm.size))

    program = training_program(sharded.stages, micro_batches, prefetch)
    sent = {name: unit.shard.nbytes * (comm.size - 1) for name, unit in sharded.units.items()}
    gathers, reduces = ([i.unit for i in program if isinstance(i, kind)] for kind in (Gather, Reduce))
    reduction = {"mpi": "Ireduce_scatter_block", "alltoall": "Ialltoall"}[reduce]
    assert calls == {"Iallgather": len(gathers), reduction: len(reduces)}
    assert nbytes == {"Iallgather": sum(sent[u] for u in gathers), reduction: sum(sent[u] for u in reduces)}
    assert output.counters.bytes_gathered == nbytes["Iallgather"]
    assert output.counters.bytes_reduced == nbytes[reduction]
    if prefetch < 2:  # 2 gathers and 1 reduce of every unit; 1 gather of the first and the last
        assert (len(gathers), len(reduces)) == ((2 * 4 - 2) * micro_batches, 4 * micro_batches)


@ways
def test_messages_beyond_the_count_limit(comm, way, monkeypatch):
    """Larger than one call's count: sent in larger units, reduced by an all-to-all. The same numbers come out."""
    batch = deal(tokens(2 * comm.size), 1, comm.rank, comm.size)

    def gradients(**options: Any) -> tuple[Any, dict[str, np.ndarray]]:
        sharded = sharded_on(comm, small_gpt2(), **options)
        calls, _ = record(sharded.transport)
        sharded.step(batch)
        return calls, sharded.full_gradients()

    _, expected = gradients(**way)
    monkeypatch.setattr(collectives, "COUNT_LIMIT", 1000)
    calls, found = gradients(**way)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    if way == WAYS[0] and comm.size < 3:  # slices of all units but the last hold more than 1000
        assert calls["Ialltoall"] > calls["Ireduce_scatter_block"]
    if way["transport"] == "shm" and comm.size == 4:
        _, found = gradients(transport="shm", ranks_on_node=2)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


# -- memory -----------------------------------------------------------------------------------
@ways
def test_lasting_memory_falls_as_one_over_the_ranks(comm, way):
    model = small_gpt2()
    sharded = sharded_on(comm, model, **way)
    optim = AdamW(sharded)
    optim.step(sharded.step(deal(tokens(comm.size), 1, comm.rank, comm.size)))
    memory, padding = sharded.device.memory, len(sharded.units) * ALIGN * 4
    for kind, copies in ((Kind.PARAMETER, 1), (Kind.GRADIENT, 1), (Kind.MOMENT, 2)):
        share = copies * 4 * model.size / comm.size
        least = share - copies * padding * (comm.rank == comm.size - 1) * comm.size  # all padding lies on the last rank
        assert least <= memory.current(kind) <= share + copies * padding, kind
        assert memory.peak(kind) == memory.current(kind)


class Equal(Module):
    """A layer of one (V, V) matrix; as the first it looks tokens up, as the last it predicts: all units are of one size."""

    def __init__(self, index: int, layers: int) -> None:
        self.name, self.place = f"unit{index}", index - layers + 1
        self.first = index == 0
        self.backward_reads_weights = not self.first
        self.weight = Parameter(f"unit{index}.weight", (V, V), Normal(0.3))
        self.parameters = [self.weight]

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        if self.first:
            return ops.embedding(tape, batch.ids, self.weight)
        if self.place == 0:
            return ops.cross_entropy(tape, x, self.weight, batch.targets)
        return ops.residual(tape, x, ops.linear(tape, x, self.weight))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce", ["mpi", "alltoall"])
def test_the_peak_of_full_parameters_is_prefetch_plus_one_units(comm, prefetch, reduce):
    sharded = sharded_on(comm, Model([Equal(i, 6) for i in range(6)], None), prefetch=prefetch, transport="mpi", reduce=reduce)
    unit = 4 * next(iter(sharded.units.values())).layout.padded_size
    sharded.device.memory.reset_peak()
    sharded.step(deal(tokens(2 * comm.size), 1, comm.rank, comm.size))
    memory = sharded.device.memory
    assert memory.peak(Kind.GATHERED) == (prefetch + 1) * unit
    # One that backward writes, one that is being reduced; and one that waits where programs lag.
    assert memory.peak(Kind.FULL_GRADIENT) == (3 if STAND_IN else 2) * unit
    before = memory.current()
    sharded.step(deal(tokens(2 * comm.size), 1, comm.rank, comm.size))
    assert memory.peak(Kind.GATHERED) == (prefetch + 1) * unit and memory.current() == before  # nothing piles up


def test_activations_are_gone_after_the_step(comm):
    sharded = sharded_on(comm, small_llama())
    held = []
    for _ in range(3):
        output = sharded.step(deal(tokens(2 * comm.size), 1, comm.rank, comm.size))
        held.append(sharded.device.memory.current(Kind.ACTIVATION) + sharded.device.memory.current(Kind.STAGING))
        if STAND_IN:  # what came from all ranks is kept for the next step's
            held[-1] -= sum(slot.array.nbytes for slot in sharded.transport.parts)
    scratch = getattr(sharded.device, "panels", None)  # of compiled products, kept from one to the next
    assert held[0] == held[1] == held[2] < 4096 + (0 if scratch is None else scratch.nbytes)  # and rotary tables stay
    assert np.isfinite(output.loss)


class KeepsAView(Equal):
    """What no module may do: backward with the array that forward saw, which is freed by then."""

    def __init__(self, index: int, layers: int) -> None:
        super().__init__(index, layers)
        self.backward_reads_weights = False

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        stale = self.weight.data

        def product(a: Any, b: Any) -> Any:
            return tape.device.matmul(a.reshape(-1, V), b).reshape(a.shape)

        def rule(tape: Tape, dy: Any, x: Tensor) -> None:
            x.accumulate(product(dy, stale), tape.device)

        return tape.record(product(x.data, stale.T), rule, x)


class ReadsFreedWeights(KeepsAView):
    """The same through the parameter."""

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        return ops.linear(tape, x, self.weight)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_stale_view_cannot_pass(comm, prefetch):
    batch = deal(tokens(comm.size), 1, comm.rank, comm.size)
    sharded = sharded_on(comm, Model([Equal(0, 3), KeepsAView(1, 3), Equal(2, 3)], None), transport="mpi", prefetch=prefetch)
    output = sharded.step(batch)
    assert np.isfinite(output.loss) and np.isnan(output.grad_norm)


@ways
def test_weights_of_a_freed_unit_cannot_be_read(comm, way):
    sharded = sharded_on(comm, Model([Equal(0, 3), ReadsFreedWeights(1, 3), Equal(2, 3)], None), **way)
    with pytest.raises(RuntimeError, match=r"unit1\.weight was read while its unit is not gathered"):
        sharded.step(deal(tokens(comm.size), 1, comm.rank, comm.size))
    del sharded
    gc.collect()  # the step was given up, but what it has sent and is to receive is still under way
    assert np.isfinite(sharded_on(comm, small_gpt2(), **way).step(deal(tokens(comm.size), 1, comm.rank, comm.size)).loss)


# -- the same on any number of ranks -----------------------------------------------------------
@ways
def test_initial_weights_are_a_function_of_their_names(comm, way):
    model = small_gpt2()
    weights = sharded_on(comm, model, seed=5, **way).full_weights()
    assert weights.keys() == {p.name for p in model.parameters}
    for p in model.parameters:
        np.testing.assert_array_equal(weights[p.name].ravel(), fill(p.init, 5, p.name, 0, p.size), err_msg=p.name)


Trained = tuple[list[float], list[float], dict[str, np.ndarray]]


def train_small(on: Any, make: Any, dropout: float, sequences: int, **options: Any) -> Trained:
    """Losses, gradient norms and final weights of a few steps on `on`, micro-batches of 2."""
    sharded = sharded_on(on, make(dropout=dropout), seed=3, **options)
    optim = AdamW(sharded, lr=1e-2)
    outputs = []
    for step in range(4):
        inputs, targets = tokens(sequences, seed=step)
        targets[2:4] = -100  # a whole global micro-batch: number 1
        outputs.append(sharded.step(deal((inputs, targets), 2, on.rank, on.size)))
        optim.step(outputs[-1])
    return [o.loss for o in outputs], [o.grad_norm for o in outputs], sharded.full_weights()


@cache
def train_alone(make: Any, dropout: float, sequences: int) -> Trained:
    from mpi4py import MPI

    return train_small(MPI.COMM_SELF, make, dropout, sequences, transport="mpi", **on_numpy())


@ways
@pytest.mark.parametrize("make", [small_gpt2, small_llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_is_the_same_as_on_one_rank(comm, make, dropout, way):
    """Dropout masks too: they belong to the global micro-batch. Some ranks' micro-batches have no valid token."""
    sequences = 2 * 2 * comm.size
    losses, norms, weights = train_small(comm, make, dropout, sequences, **way)
    alone = train_alone(make, dropout, sequences)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    np.testing.assert_allclose(norms, alone[1], rtol=1e-4)
    for name, value in alone[2].items():
        if "c_attn.bias" not in name:  # its keys' third is noise: see tests/golden/__init__.py
            assert np.linalg.norm(weights[name] - value) <= 1e-4 * np.linalg.norm(value), name
    assert len(set(comm.allgather((tuple(losses), tuple(norms))))) == 1  # every rank says the same


def test_dropout_is_on_in_training_and_off_in_evaluation(comm):
    sharded = sharded_on(comm, small_gpt2(dropout=0.5))
    batch = deal(tokens(comm.size), 1, comm.rank, comm.size)
    losses = [sharded.step(batch).loss for _ in range(2)]  # no optimizer: the weights stay
    assert losses[0] != losses[1]  # another step, other masks
    assert len({sharded.evaluate([(batch[0][0], batch[1][0])])[0] for _ in range(2)}) == 1


# -- parameters that a batch does not reach ----------------------------------------------------
class Spare(Equal):
    """Has a weight, a scalar and an empty parameter that its forward never touches."""

    def __init__(self, index: int, layers: int) -> None:
        super().__init__(index, layers)
        self.parameters = [Parameter("spare", (7, 3), Normal(1.0)), self.weight, Parameter("scalar", (), Normal(1.0)),
                           Parameter("empty", (0, 5), Normal(1.0))]


class Nothing(Module):
    """A module without parameters: a unit of size 0."""

    name, parameters = "nothing", []

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        return ops.gelu(tape, x)


@ways
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_parameters_that_a_batch_does_not_reach_stay(comm, way, micro_batches):
    sharded = sharded_on(comm, Model([Equal(0, 3), Nothing(), Spare(1, 3), Equal(2, 3)], None), **way)
    before = sharded.full_weights()
    optim = AdamW(sharded, weight_decay=0.0)
    for step in range(3):
        output = sharded.step(deal(tokens(micro_batches * comm.size, seed=step), 1, comm.rank, comm.size))
        gradients = sharded.full_gradients()
        optim.step(output)
    after = sharded.full_weights()
    assert gradients.keys() == after.keys() == {"unit0.weight", "spare", "unit1.weight", "scalar", "empty", "unit2.weight"}
    for name in ("spare", "scalar", "empty"):
        np.testing.assert_array_equal(gradients[name], np.zeros_like(before[name]))
        np.testing.assert_array_equal(after[name], before[name])
    assert not np.array_equal(after["unit1.weight"], before["unit1.weight"])
    unseen = np.setdiff1d(np.arange(V), np.concatenate([tokens(micro_batches * comm.size, seed=s)[0].ravel() for s in range(3)]))
    np.testing.assert_array_equal(after["unit0.weight"][unseen], before["unit0.weight"][unseen])


def test_positions_beyond_the_batch_get_no_gradient(comm):
    sharded = sharded_on(comm, small_gpt2())
    for t in (T, T - 4):  # the longer first: its gradient must not be seen again
        sharded.step(deal(tokens(2 * comm.size, t), 2, comm.rank, comm.size))
    gradient = sharded.full_gradients()["transformer.wpe.weight"]
    assert not gradient[T - 4:].any() and gradient[: T - 4].any()


# -- what is refused, everywhere at once -------------------------------------------------------
def test_batches_that_would_hang_are_refused_on_every_rank(comm):
    sharded = sharded_on(comm, small_gpt2())
    inputs, targets = deal(tokens(2 * comm.size), 1, comm.rank, comm.size)
    last = comm.rank == comm.size - 1
    for wrong in ((inputs[0], targets[0]), (inputs, targets[..., :-1]), (inputs[:0], targets[:0]), (inputs[..., :0], targets[..., :0])):
        with pytest.raises(ValueError, match=f"one shape.*rank {comm.size - 1}: "):
            sharded.step(wrong if last else (inputs, targets))
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"rank 0: \(2, 1, 9\).*: \(1, 1, 9\)"):
            sharded.step((inputs[:1], targets[:1]) if last else (inputs, targets))
    assert np.isfinite(sharded.step((inputs, targets)).loss)  # and the next one works


def test_a_step_without_any_valid_token_is_refused_on_every_rank(comm):
    sharded = sharded_on(comm, small_gpt2())
    inputs, targets = deal(tokens(comm.size, seed=1), 1, comm.rank, comm.size)
    with pytest.raises(ValueError, match="no valid token"):
        sharded.step((inputs, np.full_like(targets, -100)))
    with pytest.raises(ValueError, match="no valid token"):
        sharded.evaluate([(inputs[0], np.full_like(targets[0], -100))])
    targets = np.full_like(targets, -100)
    targets[0, 0, 0] = 1 if comm.rank == 0 else -100
    assert sharded.step((inputs, targets)).tokens == 1  # one on one rank is enough


# -- evaluation --------------------------------------------------------------------------------
def test_evaluation_is_one_token_weighted_mean(comm):
    """Ragged sequences, and ranks with different numbers of batches of different sizes."""
    from mpi4py import MPI

    inputs, targets = tokens(11, seed=4)
    alone = sharded_on(MPI.COMM_SELF, small_llama(), transport="mpi")
    losses, counts = zip(*(alone.evaluate([(inputs[i:i + 1], targets[i:i + 1])]) for i in range(11) if (targets[i] >= 0).any()),
                         strict=True)
    expected = np.dot(losses, counts) / sum(counts)
    assert abs(np.mean(losses) - expected) > 1e-3  # the mean of means is something else
    mine = np.array_split(np.arange(11), comm.size)[comm.rank]
    batches = [(inputs[rows], targets[rows]) for rows in np.array_split(mine, max(1, 3 - comm.rank)) if len(rows)]
    sharded = sharded_on(comm, small_llama())
    assert sharded.evaluate(batches) == (pytest.approx(expected, rel=1e-6), sum(counts))
    others = [(inputs[rows], targets[rows]) for rows in [mine] if comm.rank or comm.size == 1]  # rank 0 brings none
    left_out = np.count_nonzero(targets[np.array_split(np.arange(11), comm.size)[0]] >= 0) if comm.size > 1 else 0
    assert sharded.evaluate(iter(others))[1] == sum(counts) - left_out


@pytest.mark.parametrize("micro", [1, 2, 5])
def test_the_evaluation_of_a_corpus_does_not_depend_on_ranks_and_micro_batches(comm, micro):
    from mpi4py import MPI

    class Corpus:
        ids = np.random.default_rng(7).integers(0, V, 6 * T + 4)  # the last window is ragged

        def __len__(self) -> int:
            return len(self.ids)

        def read(self, starts: Any, length: int) -> np.ndarray:
            return np.stack([self.ids[s:s + length] for s in starts])

    alone = sharded_on(MPI.COMM_SELF, small_gpt2(), transport="mpi")
    windows = [(Corpus.ids[None, s:s + T], Corpus.ids[None, s + 1:s + 1 + T]) for s in range(0, 6 * T + 3, T)]
    windows[-1] = windows[-1][0][:, :3], windows[-1][1]
    expected = alone.evaluate(windows)
    found = train.evaluate(sharded_on(comm, small_gpt2()), Batches(Corpus(), T), micro)
    assert found == (pytest.approx(expected[0], rel=1e-6), 6 * T + 3) and expected[1] == 6 * T + 3


def test_logits_are_those_of_one_rank(comm):
    from mpi4py import MPI

    ids = tokens(2)[0]
    found = sharded_on(comm, small_llama()).logits(ids)
    expected = sharded_on(MPI.COMM_SELF, small_llama(), transport="mpi").logits(ids)
    assert found.shape == (2, T, V)
    np.testing.assert_array_equal(found, expected)
