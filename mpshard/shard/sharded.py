"""A model whose weights, gradients and moments live as one slice a rank: the object users train with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from mpshard.autograd.ops import Loss
from mpshard.comm import collectives
from mpshard.comm.mesh import Mesh
from mpshard.comm.rows import RowMessages
from mpshard.comm.transport import MessageTransport, Transport
from mpshard.device.base import Array, Device
from mpshard.device.lasting import visits
from mpshard.nn.init import fill
from mpshard.nn.module import Cache, MicroBatch, Model
from mpshard.shard import exact, schedule
from mpshard.shard.engine import Counters, Engine, Prepared
from mpshard.shard.grouping import group, stages_of, tables_of
from mpshard.shard.options import Options, recomputed
from mpshard.shard.precision import LossScale
from mpshard.shard.schedule import Program
from mpshard.shard.unit import Unit


@dataclass(frozen=True)
class StepOutput:
    """What a step came to, equal on all ranks but for `counters`.

    loss: sum of token losses / valid tokens of the whole step, over ranks and micro-batches, in nats.
    tokens: valid tokens. grad_norm: 2-norm of that mean loss's gradient, before clipping; not finite if any rank's
        gradient is not. loss_scale: what the gradients in the slices are multiplied with.
    """

    loss: float
    tokens: int
    grad_norm: float
    loss_scale: float
    counters: Counters = field(repr=False)

    @property
    def is_finite(self) -> bool:
        """The one global verdict on overflow: the norm is a sum over all ranks."""
        return math.isfinite(self.grad_norm)


class Sharded:
    """A model cut into units over the ranks of a mesh. Made by `mpshard.shard`.

    Attributes
    ----------
    model, mesh, device, transport, options: what it was made of.
    units: {name: Unit}, in execution order.
    seed: with parameter names, decides initial values and dropout masks.
    steps: steps begun so far; part of the dropout masks' key.
    last: what the latest `step` returned, None before the first.
    loss_scale: the dynamic scale of fp16 gradients, None for other precisions.
    """

    def __init__(self, model: Model, mesh: Mesh, device: Device, transport: Transport, progress: collectives.Progress,
                 options: Options, *, seed: int, ignore_index: int, by_rows: bool = False) -> None:
        self.model, self.mesh, self.device, self.transport, self.progress = model, mesh, device, transport, progress
        self.options, self.seed, self.steps, self.ignore_index = options, seed, 0, ignore_index
        groups = group(model, options.unit)
        neighbours = transport.among(mesh.neighbours(options.keep_ranks)) if options.keep_ranks else None
        between = transport.among(mesh.replicas) if mesh.replicas.size > 1 and not options.replicated else None
        self.units = {
            g.name: Unit(g, mesh, transport, progress, device, options.precision,
                         replicated=options.replicated, deterministic=options.deterministic,
                         master_away=options.offloads_optimizer, neighbours=neighbours, between=between) for g in groups}
        for name, table in tables_of(model, groups).items() if by_rows else ():
            cut, ranks = self.units[name].layout.table(table.name, mesh.group.size), range(mesh.group.size)
            self.units[name].travel_by_rows(RowMessages(cast(MessageTransport, transport), [cut.whole(r) for r in ranks],
                                                        [cut.place(r) for r in ranks], cut.width))
        self.stages = stages_of(model, groups)
        self.engine = Engine(model.modules, self.stages, self.units, device, transport, progress.poll,
                             [t for t in (transport, neighbours, between) if t is not None])
        self.engine.recomputed = recomputed(model, options.recompute)
        self.engine.drops_cheap = options.recompute != "none"
        self.engine.fp8 = options.precision.products == "fp8"
        self.loss_scale = LossScale() if "fp16" in (options.precision.param, options.precision.reduce) else None
        self.last: StepOutput | None = None
        self._programs: dict[int, Prepared] = {}  # by micro-batches a step; 0: forward only
        self.initialise()

    # -- weights -----------------------------------------------------------------------------
    def initialise(self) -> None:
        """First values, a function of (seed, parameter name, element) only; each rank fills just its slice."""
        inits = {parameter.name: parameter.init for parameter in self.model.parameters}
        self.load(lambda name, start, stop: fill(inits[name], self.seed, name, start, stop))

    def load(self, read: Callable[[str, int, int], np.ndarray]) -> None:
        """Set the weights. read(name, start, stop) yields elements [start, stop) of a flattened parameter; it is asked
        for this rank's own ranges only."""
        for unit in self.units.values():
            for segment in unit.segments:
                values = np.asarray(read(segment.name, segment.start, segment.stop), unit.dtype)
                unit.master.write(segment.slice, values)
        self.publish()

    def publish(self) -> None:
        """Bring what gathers send up to date with the masters, after they were changed. Collective."""
        units = visits(self.device, list(self.units.values()), lambda unit: (unit.master,))
        for pending in [unit.publish() for unit in units]:
            if pending is not None:
                pending.wait()

    def full_weights(self, of: Callable[[Unit], bool] = lambda unit: True) -> dict[str, np.ndarray]:
        """All weights (of some units), whole, as host arrays on every rank. Collective; for small models and tests."""
        return self._full(lambda unit: unit.shard if of(unit) else None)

    def full_gradients(self) -> dict[str, np.ndarray]:
        """All gradients of the sum of token losses, whole, on every rank. Collective; for small models and tests."""
        return self._full(lambda unit: unit.gradient if unit.learns else None)

    def close(self) -> None:
        """Stop the communication thread, if there is one. The weights stay readable."""
        self.progress.close()

    def _full(self, slice_of: Callable[[Unit], Array | None]) -> dict[str, np.ndarray]:
        whole: dict[str, np.ndarray] = {}
        for unit in self.units.values():
            mine = slice_of(unit)
            if mine is None:
                continue
            mine = np.ascontiguousarray(self.device.to_host(mine))
            flat = np.empty(unit.layout.padded_size, mine.dtype)
            if unit.layout.world == 1:
                np.copyto(flat, mine)
            else:
                self.mesh.slices.Allgather(mine, flat)
            for place in unit.layout.placements:
                whole[place.name] = flat[place.offset:place.end].reshape(place.shape)
        return whole

    # -- running -----------------------------------------------------------------------------
    def step(self, batch: Sequence[Any]) -> StepOutput:
        """Forward and backward of one step; leaves the summed gradient in the shards for the optimizer.

        batch: (inputs, targets), this rank's micro-batches, int64 (micro-batches, b, t); as many micro-batches on
        every rank. Behind them may follow segments and positions of the same shape: see `MicroBatch`. Raises ValueError,
        on every rank, if any rank's batch is not so or the step has no valid token.
        """
        inputs, targets, *packing = _host_arrays(batch)
        self._agree_on_batches(inputs.shape, targets.shape)
        micro = [self._micro_batch(*parts) for parts in zip(inputs, targets, *packing, strict=True)]
        # Global micro-batch g = m * world + rank: dropout masks are a function of g, not of where it runs.
        keys = [(self.seed, self.steps, m * self.mesh.world + self.mesh.rank) for m in range(len(micro))]
        for unit in self._learning:
            unit.gradients.begin()
        scale = self.engine.loss_scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        losses, _ = self.engine.run(self._program(len(micro)), micro, keys)
        self.steps += 1
        valid = int(np.count_nonzero(targets != self.ignore_index))
        loss, tokens, squares = self._totals([cast(Loss, loss).value for loss in losses], valid)
        if tokens == 0:
            raise ValueError(f"the step has no valid token: every target is ignore_index={self.ignore_index}")
        self.last = StepOutput(loss / tokens, int(tokens), math.sqrt(squares) / scale / tokens, scale, self.engine.settle())
        return self.last

    def _totals(self, losses: list[Any], tokens: int) -> tuple[float, float, float]:
        """Sum of token losses, valid tokens, and squared norm of their gradient, over all ranks."""
        slices, comm, count = self._own_gradients(), self.mesh.comm, len(losses)
        if self.options.deterministic:
            return (exact.sum_of_values(comm, list(self.device.read(losses))), exact.sum_of_values(comm, [tokens]),
                    exact.sum_of_squares(comm, [self.device.to_host(part) for part in slices]))
        numbers = self.device.read([*losses, *(self.device.sum_of_squares(part) for part in slices)])
        mine = np.array([sum(numbers[:count]), tokens, sum(numbers[count:])], np.float64)
        loss, valid, squares = map(float, collectives.all_reduce(comm, mine))
        return loss, valid, squares

    def evaluate(self, batches: Iterable[Sequence[Any]]) -> tuple[float, int]:
        """Mean loss over the valid tokens of (inputs, targets) pairs (b, t), over all ranks, and their number.

        Pairs may have segments and positions behind them, as in `step`. Ranks may bring different numbers of pairs: one
        that has no more goes on gathering with the others. Raises ValueError, on every rank, if there is no valid token
        at all.
        """
        total = np.zeros(2)
        nothing = np.zeros((1, 1), np.int64), np.full((1, 1), self.ignore_index)
        pairs = iter(batches)
        while True:
            pair = next(pairs, None)
            if not collectives.all_max(self.mesh.comm, np.array([pair is not None], np.int64))[0]:
                break
            inputs, targets, *packing = _host_arrays(pair or nothing)
            (out,), _ = self.engine.run(self._program(0), [self._micro_batch(inputs, targets, *packing)])
            total += self.device.read([cast(Loss, out).value])[0], np.count_nonzero(targets != self.ignore_index)
        loss, tokens = map(float, collectives.all_reduce(self.mesh.comm, total))
        if tokens == 0:
            raise ValueError("the evaluation data has no valid token")
        return loss / tokens, int(tokens)

    def logits(self, ids: np.ndarray, cache: Cache | None = None, last_only: bool = False) -> np.ndarray:
        """ids (b, t) -> logits (b, t, v), on the host. Collective: every rank passes the same ids or its own of one shape.

        cache: what came before these positions; they are added to it. last_only: (b, 1, v), of the last position.
        """
        ids, positions = np.asarray(ids, np.int64), None
        if cache is not None:
            positions = np.broadcast_to(np.arange(cache.length, cache.length + ids.shape[1]), ids.shape)
        micro = self._micro_batch(ids, None, None, positions)
        micro.cache, micro.last_only = cache, last_only
        (out,), _ = self.engine.run(self._program(0), [micro])
        assert not isinstance(out, Loss)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.device.to_host(out.data)

    def _agree_on_batches(self, inputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
        """Raise on every rank, before any starts, if a batch has a wrong shape or ranks have different numbers of
        micro-batches: otherwise some would wait for ever in a collective that the others do not make."""
        wrong = len(inputs) != 3 or inputs != targets or not inputs[0] or not inputs[2]
        count = inputs[0] if inputs else 0
        any_wrong, most, minus_least = collectives.all_max(self.mesh.comm, np.array([wrong, count, -count], np.int64))
        if any_wrong or most != -minus_least:
            shapes = "; ".join(f"rank {rank}: {a}, {b}" for rank, (a, b) in enumerate(self.mesh.comm.allgather((inputs, targets))))
            raise ValueError("a step takes inputs and targets of one shape (micro-batches, b, t), the first equal on all ranks "
                             f"and at least 1, as t is, not {shapes}")

    def _micro_batch(self, *arrays: np.ndarray | None) -> MicroBatch:
        """inputs, targets, segments, positions on the device; those missing are None."""
        fields = dict(zip(("ids", "targets", "segments", "positions"), arrays, strict=False))
        on_device = {name: self.device.from_host(array) for name, array in fields.items() if array is not None}
        return MicroBatch(**on_device, ignore_index=self.ignore_index)

    def program(self, micro_batches: int) -> Program:
        """The instructions of a step of that many micro-batches a rank."""
        return self._program(micro_batches).program

    def _program(self, micro_batches: int) -> Prepared:
        if micro_batches not in self._programs:
            o = self.options
            lag, offload = (0, False) if self.device.on_host else (1, o.offloads_activations)
            # It keeps a block's gradients longer. Where ranks share memory there are no messages to hide with that.
            weights_last = self.mesh.world > 1 and not self.transport.in_place and not offload
            program = (schedule.training_program(self.stages, micro_batches, o.prefetch, o.stay, o.reduce_once, lag, offload, weights_last)
                       if micro_batches else schedule.forward_program(self.stages, o.prefetch, lag))
            self._programs[micro_batches] = self.engine.prepare(program)
        return self._programs[micro_batches]

    @property
    def _learning(self) -> list[Unit]:
        return [unit for unit in self.units.values() if unit.learns]

    def _own_gradients(self) -> list[Array]:
        """The parts of the gradient that this rank owns: every element of the model lies in one rank's part, so a sum
        over ranks counts it once."""
        return [unit.gradient[place] for unit in self._learning for place in unit.owned_places]


def _host_arrays(batch: Sequence[Any]) -> list[np.ndarray]:
    """inputs, targets and, where there are any, segments, positions."""
    types = (np.int64, np.int64, np.int32, np.int64)
    return [np.asarray(part, dtype) for part, dtype in zip(batch, types, strict=False) if part is not None]
