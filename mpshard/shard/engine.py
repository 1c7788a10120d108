"""Executes programs: one handler an instruction, nothing decided here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from mpshard.autograd.ops import Loss
from mpshard.autograd.tensor import Tape, Tensor
from mpshard.comm.transport import Slot, Transport
from mpshard.device.base import Accelerator, Array, Device, Kind
from mpshard.nn.module import MicroBatch, Module
from mpshard.shard import schedule
from mpshard.shard.away import Away
from mpshard.shard.observer import Observer
from mpshard.shard.replays import Replays
from mpshard.shard.schedule import (
    Backward,
    Fetch,
    Finish,
    Forward,
    Free,
    Gather,
    Instruction,
    Offload,
    Program,
    Reduce,
    Release,
    Slots,
    Stage,
    Step,
    Weights,
)
from mpshard.shard.unit import Unit


@dataclass
class Counters:
    """What one run of a program took on this rank: seconds, and bytes of messages.

    `*_wait_s`: compute stood still for communication. `in_flight_s`: communications were under way, waited for or not.
    On a device, compute is the device's: see `Engine.settle`.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    gather_wait_s: float = 0.0
    reduce_wait_s: float = 0.0
    in_flight_s: float = 0.0
    bytes_gathered: int = 0
    bytes_reduced: int = 0

    @property
    def hidden_fraction(self) -> float:
        """Share of the time communications were under way during which compute went on; 1 without communication."""
        if self.in_flight_s <= 0.0:
            return 1.0
        return max(0.0, 1.0 - (self.gather_wait_s + self.reduce_wait_s) / self.in_flight_s)

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Prepared:
    """A program, the micro-batches that each of its gathers serves, the buffer of each gather and gradient, where each
    unit's gradient is finished for the last time, and whether backward leaves nothing for later."""

    program: Program
    serves: Mapping[int, tuple[int, ...]]
    full: Slots
    gradients: Slots
    last_finish: Mapping[str, int]
    whole: bool


class Buffers:
    """A set of slots that programs share: each program asks for its sizes and gets the largest for the largest."""

    def __init__(self, allocate: Callable[[int], Slot]) -> None:
        self.allocate = allocate
        self.slots: list[Slot] = []

    def fit(self, sizes: Sequence[int]) -> list[Slot]:
        """One slot for each size, at least as large; made or grown only if no earlier program needed as much."""
        order = sorted(range(len(sizes)), key=lambda slot: -sizes[slot])
        for place, index in enumerate(order):
            if place == len(self.slots):
                self.slots.append(self.allocate(sizes[index]))
            elif self.slots[place].array.size < sizes[index]:
                del self.slots[place]  # let the old one go before the larger one is made
                self.slots.insert(place, self.allocate(sizes[index]))
        return [self.slots[order.index(index)] for index in range(len(sizes))]


class Engine:
    """Runs programs over a model's modules and units."""

    def __init__(self, modules: Sequence[Module], stages: Sequence[Stage], units: Mapping[str, Unit],
                 device: Device, transport: Transport, poll: Callable[[], None],
                 carriers: Sequence[Transport] = ()) -> None:
        self.modules = {module.name: module for module in modules}
        self.order = [module.name for module in modules]
        self.trained = [stage.name for stage in schedule.trained(stages)]  # those that run backward
        self.stages, self.units = {stage.name: stage for stage in stages}, units
        self.device, self.transport, self.poll = device, transport, poll
        self.carriers = carriers or [transport]  # whatever moves bytes: `transport`, and those among other ranks
        self.observer: Observer | None = None
        self.counters = Counters()
        self.spans: list[tuple[str, Any, Any]] = []  # on a device: what its time between two marks was spent on
        unit = next(iter(units.values()))
        dtype, self.wire, self.encoded = unit.computes_in, unit.wire, not unit.travels_as_it_is
        # Gathered units: what computes and, if weights travel in another format, what has arrived. Neither is needed
        # where a unit can be read as it lies.
        self.full = Buffers(lambda size: transport.slot(size, dtype, Kind.GATHERED) if not self.encoded
                            else Slot(device.empty(size, dtype, Kind.GATHERED)))
        self.words = Buffers(lambda size: transport.slot(size, self.wire.dtype, Kind.GATHERED))
        self.full_gradients = Buffers(lambda size: transport.slot(size, unit.gradient_in, Kind.FULL_GRADIENT))
        self.handlers: dict[type, Callable[..., None]] = {
            Gather: self._gather, Forward: self._forward, Free: self._free, Backward: self._backward,
            Weights: self._weights,
            Reduce: self._reduce, Finish: self._finish, Step: self._step,
            Offload: self._offload, Release: self._release, Fetch: self._fetch}
        self.away = Away(cast(Accelerator, device))  # used by programs that offload, which are a device's
        self.replays = Replays(device, units, self.stages)
        self.recomputed: frozenset[str] = frozenset()  # stages that keep only their input, and run forward twice
        self.drops_cheap = False  # whether norms and activations are made again in backward
        self.fp8 = False  # whether the blocks' products round their inputs to 8 bits
        self.loss_scale = 1.0
        # Where it is, for whoever asks from another thread: instructions begun so far, the one under way, and the
        # communication that it waits for.
        self.begun = 0
        self.doing: Instruction | None = None
        self.waits_for = ""

    def watch(self, observer: Observer | None) -> None:
        """Tell `observer` of what happens from now on; None: nobody."""
        self.observer = observer
        for unit in self.units.values():
            unit.observer = observer

    def audit(self, look: Callable[[Unit, Array], None] | None) -> None:
        """Show every gathered unit to `look(unit, full vector)` from now on, just before it is freed; None: to nobody."""
        for unit in self.units.values():
            unit.audit = look

    def visit(self, look: Callable[[Unit, Array], None]) -> None:
        """Gather each unit in turn, show it to `look(unit, full vector)`, free it. Between programs; collective."""
        for unit in self.units.values():
            sizes = [unit.layout.padded_size]
            in_place = self.transport.in_place
            slot = self.full.fit(sizes)[0] if self.encoded or not in_place else None
            words = self.words.fit(self._words(sizes))[0] if self.encoded and not in_place else None
            unit.start_gather(slot, words)
            self._wait_for([unit.name])
            look(unit, unit.full)
            unit.free()

    def prepare(self, program: Program) -> Prepared:
        """Choose the buffer of every gather and gradient of a program, once."""
        sizes = {name: unit.layout.padded_size for name, unit in self.units.items()}
        return Prepared(program, schedule.served(program, self.stages.values()), schedule.full_slots(program, sizes),
                        schedule.gradient_slots(program, self.stages.values(), sizes),
                        {i.unit: index for index, i in enumerate(program) if isinstance(i, Finish)},
                        not any(isinstance(i, Weights) for i in program))

    def run(self, prepared: Prepared, batches: Sequence[MicroBatch],
            keys: Sequence[tuple[Any, ...]] = ()) -> tuple[list[Tensor], Counters]:
        """Execute a program.

        batches: this rank's micro-batches. keys: for each, what its random operations depend on; empty: nothing is
        recorded for backward. Returns the last stage's output for every micro-batch, and what the run took.
        """
        self.batches, self.keys, self.prepared = batches, keys, prepared
        self.counters = Counters()
        self.spans = []
        self.tapes: dict[tuple[str, int], tuple[Tape, Tensor | None, Tensor | None]] = {}  # (stage, micro-batch): tape, input, output
        self.unfinished: dict[tuple[str, int], Tape] = {}  # backward of inputs done, of weights not
        self.stream: dict[int, Tensor] = {}  # what flows between stages: activations forward, then gradients backward
        self.outputs: list[Tensor] = []
        self.away.begin()
        self.replays.begin(prepared.whole)
        in_place = self.transport.in_place
        self.full_of = self.full.fit(prepared.full.sizes) if self.encoded or not in_place else []
        self.words_of = self.words.fit(self._words(prepared.full.sizes)) if self.encoded and not in_place else []
        self.gradient_of = self.full_gradients.fit(prepared.gradients.sizes)
        gathered, reduced = self._bytes()
        for self.index, instruction in enumerate(prepared.program):
            start = 0.0 if self.observer is None else time.perf_counter()
            self.begun, self.doing = self.begun + 1, instruction
            self.handlers[type(instruction)](instruction)
            if self.observer is not None:
                self.observer.ran(self.index, instruction, start, time.perf_counter())
        gathered_now, reduced_now = self._bytes()
        self.counters.bytes_gathered, self.counters.bytes_reduced = gathered_now - gathered, reduced_now - reduced
        self.stream, self.doing = {}, None
        return self.outputs, self.counters

    def _bytes(self) -> tuple[int, int]:
        """Gathered, reduced so far."""
        return sum(carrier.bytes_gathered for carrier in self.carriers), sum(carrier.bytes_reduced for carrier in self.carriers)

    def _gather(self, instruction: Gather) -> None:
        number, unit = self.prepared.full.taken[self.index], self.units[instruction.unit]
        ids = None if unit.rows is None else {mb: self.batches[mb].ids for mb in self.prepared.serves[self.index]}
        unit.start_gather(self.full_of[number] if self.full_of else None, self.words_of[number] if self.words_of else None,
                          instruction.kept, ids)

    def _words(self, sizes: Sequence[int]) -> list[int]:
        """How many words of the travelling format slots of `sizes` elements need: the slices' words, end to end."""
        slices = next(iter(self.units.values())).layout.world
        return [self.wire.size(size // slices) * slices for size in sizes]

    def settle(self) -> Counters:
        """The counters of the last run. On a device its own times replace the host's, which only issued the work: to be
        asked when the device has done it."""
        if self.spans:
            self.counters.forward_s = self.counters.backward_s = self.counters.gather_wait_s = self.counters.reduce_wait_s = 0.0
        for name, start, end in self.spans:
            setattr(self.counters, name, getattr(self.counters, name) + cast(Accelerator, self.device).seconds(start, end))
        self.spans = []
        return self.counters

    def _mark(self) -> Any:
        """A point in the device's work; None where the host computes, and its clock says all."""
        return None if self.device.on_host else cast(Accelerator, self.device).mark()

    def _span(self, name: str, start: Any) -> None:
        """The device's time from `start` to here counts as `name`."""
        if start is not None:
            self.spans.append((name, start, self._mark()))

    def _wait_for(self, units: Sequence[str]) -> float:
        waited_here, mark = 0.0, self._mark()
        for name in units:
            self.waits_for = f"Gather {name}"
            waited, in_flight = self.units[name].wait_full()
            self.waits_for = ""
            self.counters.in_flight_s += in_flight
            waited_here += waited
        self.counters.gather_wait_s += waited_here
        self._span("gather_wait_s", mark)
        return waited_here

    def _forward(self, instruction: Forward) -> None:
        start = time.perf_counter()
        name, mb = instruction.stage, instruction.micro_batch
        waited, mark = self._wait_for(self.stages[name].reads), self._mark()
        trained = bool(self.keys) and name in self.trained
        tape = self._tape(name, mb, recording=trained and name not in self.recomputed)
        x = self.stream.pop(mb, None)
        if x is not None:
            x = Tensor(x.data, wants_grad=name != self.trained[0])
        drops_cheap = trained and self.drops_cheap and name != self.order[-1]  # the last one's backward follows at once
        y = self.replays.forward(self.modules[name], tape, x, self.batches[mb], drops_cheap)
        if trained:
            self.tapes[name, mb] = tape, x, y if tape.recording else None
        if name == self.order[-1]:
            self.outputs.append(y)
        else:
            self.stream[mb] = y
        self.counters.forward_s += time.perf_counter() - start - waited
        self._span("forward_s", mark)

    def _tape(self, name: str, mb: int, recording: bool) -> Tape:
        key = (*self.keys[mb], name) if self.keys else ()
        return Tape(self.device, recording, bool(self.keys), key, self.poll, self.fp8)

    def _backward(self, instruction: Backward) -> None:
        start = time.perf_counter()
        name, mb = instruction.stage, instruction.micro_batch
        waited, mark = self._wait_for(self.stages[name].backward_reads), self._mark()
        for unit in self.stages[name].gradients:
            if not self.units[unit].gradients.is_open:
                slot = self.gradient_of[self.prepared.gradients.taken[unit, mb]]
                self.waits_for = f"Reduce {unit}"  # of others, who may still read what the buffer held
                waited_for_slot = self.units[unit].gradients.open(slot)
                self.waits_for = ""
                self.counters.reduce_wait_s += waited_for_slot
                waited += waited_for_slot
        self.away.arrive((name, mb))
        tape, x, y = self.tapes.pop((name, mb))
        if name in self.recomputed:  # forward again, this time recorded; the tape draws the same random numbers
            tape = self._tape(name, mb, recording=True)
            y = self.modules[name].forward(tape, x, self.batches[mb])
        # The gradient of the sum of token losses is 1 (times a scale that keeps 16-bit gradients off zero): nothing is
        # divided here, the optimizer divides once by the step's valid tokens, so accumulation, padding and world size
        # drop out.
        self.replays.backward(tape, y, self.loss_scale if isinstance(y, Loss) else self.stream.pop(mb).grad, instruction.inputs_only)
        if instruction.inputs_only:
            self.unfinished[name, mb] = tape
        if x is not None:
            x.data = None
            self.stream[mb] = x
        for unit in self.stages[name].gradients:
            self.units[unit].gradients.written()
        self.counters.backward_s += time.perf_counter() - start - waited
        self._span("backward_s", mark)

    def _weights(self, instruction: Weights) -> None:
        start, mark = time.perf_counter(), self._mark()
        self.unfinished.pop((instruction.stage, instruction.micro_batch)).backward_weights()
        for unit in self.stages[instruction.stage].gradients:
            self.units[unit].gradients.written()
        self.counters.backward_s += time.perf_counter() - start
        self._span("backward_s", mark)

    def _free(self, instruction: Free) -> None:
        self.units[instruction.unit].free(instruction.keep)

    def _reduce(self, instruction: Reduce) -> None:
        self.units[instruction.unit].gradients.start_reduce(instruction.micro_batch)

    def _finish(self, instruction: Finish) -> None:
        gradients = self.units[instruction.unit].gradients
        self.waits_for, mark = f"Reduce {instruction.unit}", self._mark()
        waited, in_flight = gradients.finish()
        self._span("reduce_wait_s", mark)  # with the sum over what came from all ranks
        self.waits_for = ""
        self.counters.reduce_wait_s += waited
        self.counters.in_flight_s += in_flight
        if self.index == self.prepared.last_finish[instruction.unit]:
            gradients.start_settle()

    def _offload(self, instruction: Offload) -> None:
        key = instruction.stage, instruction.micro_batch
        tape, x, _ = self.tapes[key]
        self.away.offload(key, [*tape.kept(), *([] if x is None else [x])])

    def _release(self, instruction: Release) -> None:
        key = instruction.stage, instruction.micro_batch
        self.away.release(key)
        self.tapes[key][0].drop_unread()

    def _fetch(self, instruction: Fetch) -> None:
        self.away.fetch((instruction.stage, instruction.micro_batch))

    def _step(self, instruction: Step) -> None:
        """The gradients are complete after this; the optimizer runs outside, on the slices."""
        for unit in self.units.values():
            if unit.learns:
                self.waits_for = f"Reduce {unit.name}"
                self.counters.reduce_wait_s += unit.gradients.settle()
        self.waits_for = ""
