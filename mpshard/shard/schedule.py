"""The step as a program: a pure function from the model's stages to a flat list of instructions.

The engine executes the list, the planner costs it, the trace draws it and the tests assert on it without
MPI. Every rank runs the same list, so the collectives' order is the same everywhere by construction.

How it is made. Lay out the step's uses in time: forward of every stage, backward of every stage in reverse,
for each micro-batch. A unit is resident from the first use of a run of uses to the last; runs are cut wherever
freeing in between would save memory, that is wherever its next gather starts later than its free. Then each
gather is placed `prefetch` uses before the run begins, each free right after the run ends, each reduce after the
last gradient of the micro-batch but behind the gathers for the next use, which are needed sooner, and each finish as
late as the gradient buffers allow.

Note on lag. On a device that works by itself an instruction only issues its work, and whoever enters MPI may stay there
a while. So the device should have work whenever the host goes there: with lag 1 the gathers and reduces of one use are
started only when the next use has been issued: backward of unit i-1 is under way on the device when the host turns to
unit i's gradient. What is read or overwritten is not what that use works on: a gather comes before the free that
follows the same use, so it takes another slot, and a gradient waits in its buffer, one more than without lag.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class Gather:
    """Start the all-gather of a unit's slices into its slot; if `kept` from the few ranks among which it was left."""

    unit: str
    kept: bool = False


@dataclass(frozen=True)
class Forward:
    """Wait for the units the stage reads, run it forward on one micro-batch."""

    stage: str
    micro_batch: int


@dataclass(frozen=True)
class Backward:
    """Wait for the units the stage's backward reads, run it, writing gradients into its units' buffers; if `inputs_only`
    leave the weights' to `Weights`."""

    stage: str
    micro_batch: int
    inputs_only: bool = False


@dataclass(frozen=True)
class Weights:
    """Make the gradients that the stage's backward has left."""

    stage: str
    micro_batch: int


@dataclass(frozen=True)
class Free:
    """The full unit is gone after this; only this rank's slice stays and, to `keep`, its part for a gather among few."""

    unit: str
    keep: bool = False


@dataclass(frozen=True)
class Reduce:
    """Start the reduce-scatter of a unit's gradient buffer."""

    unit: str
    micro_batch: int


@dataclass(frozen=True)
class Finish:
    """Wait for the unit's reduce and add the summed slice into the gradient shard; its buffer is free again."""

    unit: str
    micro_batch: int


@dataclass(frozen=True)
class Offload:
    """Start copying what the stage's forward kept from the device to the host."""

    stage: str
    micro_batch: int


@dataclass(frozen=True)
class Release:
    """The device's copies of it are gone after this."""

    stage: str
    micro_batch: int


@dataclass(frozen=True)
class Fetch:
    """Start copying it back, for the stage's backward."""

    stage: str
    micro_batch: int


@dataclass(frozen=True)
class Step:
    """One all-reduce for the loss and the norm, then the optimizer on every slice."""


Instruction = Gather | Forward | Backward | Weights | Free | Reduce | Finish | Offload | Release | Fetch | Step
Program = tuple[Instruction, ...]
Use = Forward | Backward | Weights


@dataclass(frozen=True)
class Stage:
    """What the schedule has to know of a module: the units it reads and those it makes gradients for."""

    name: str
    reads: tuple[str, ...]
    backward_reads: tuple[str, ...]
    gradients: tuple[str, ...]


class Stay(Enum):
    """How long a gathered unit stays full at the longest, even though freeing it would save memory."""

    USE = auto()  # ZeRO-3: freed after each use
    GROUP = auto()  # freed after each use, but until the micro-batch's next use it stays whole among a few ranks
    MICRO_BATCH = auto()  # kept from forward to backward
    STEP = auto()  # ZeRO-2 and below: gathered once a step


def training_program(stages: Sequence[Stage], micro_batches: int, prefetch: int, stay: Stay = Stay.USE,
                     reduce_once: bool = False, lag: int = 0, offload: bool = False, weights_last: bool = False) -> Program:
    """The instructions of a step.

    prefetch: how many stages ahead of its use a gather is started, in both directions. One reduce is in flight behind
    the compute. stay: see `Stay`. reduce_once: add up the micro-batches in the full gradient, which then stays, and
    reduce it after the last; else every micro-batch's gradient is reduced and added to the slice. lag: 1 for devices that
    work while the host goes on, see the note; 0 for others. offload: what forward keeps goes to the host and comes back.
    weights_last: the first stage's reduce, the step's last, has nothing behind it to hide behind, unless the second stage
    leaves its weights' gradients until the first has made its own.
    """
    uses: list[Use] = []
    for mb in range(micro_batches):
        uses += [Forward(stage.name, mb) for stage in stages]
        uses += [Backward(stage.name, mb) for stage in reversed(trained(stages))]
    if weights_last and len(trained(stages)) > 2:
        (first, second), mb = trained(stages)[:2], micro_batches - 1
        if not set(first.gradients) & set(second.gradients):
            uses[-2:] = [Backward(second.name, mb, inputs_only=True), Backward(first.name, mb), Weights(second.name, mb)]
    return _schedule(stages, uses, prefetch, stay, reduce_once, lag, offload) + (Step(),)


def trained(stages: Sequence[Stage]) -> Sequence[Stage]:
    """The stages that run backward: from the first one that makes gradients on. What is frozen before it needs none."""
    first = next((number for number, stage in enumerate(stages) if stage.gradients), len(stages))
    return stages[first:]


def forward_program(stages: Sequence[Stage], prefetch: int, lag: int = 0) -> Program:
    """Evaluation and sampling: forward of every stage once, for micro-batch 0."""
    return _schedule(stages, [Forward(stage.name, 0) for stage in stages], prefetch, lag=lag)


def _schedule(stages: Sequence[Stage], uses: Sequence[Use], prefetch: int, stay: Stay = Stay.USE,
              reduce_once: bool = False, lag: int = 0, offload: bool = False) -> Program:
    if lag not in (0, 1):
        raise ValueError(f"lag={lag}: a gather or reduce is started at once (0) or one use later (1)")
    by_name = {stage.name: stage for stage in stages}
    reads = [() if isinstance(u, Weights) else by_name[u.stage].reads if isinstance(u, Forward) else by_name[u.stage].backward_reads
             for u in uses]
    gathers, frees = _residencies(reads, [use.micro_batch for use in uses], prefetch, stay)
    opens, last_gradient = _gradient_spans(by_name, uses, reduce_once)
    before, after = _travels(uses) if offload else ({}, {})

    program: list[Instruction] = []
    in_flight: list[tuple[int, Reduce]] = []  # with the number of the use that completed it
    held: list[tuple[int, Reduce]] = []  # of gradients that the last use completed
    for now, use in enumerate(uses):
        starting = gathers.get(now, ())
        early = [gather for gather in starting if lag and gather.unit not in reads[now]]  # behind this use, not before it
        program += [gather for gather in starting if gather not in early]
        if not lag or any(reduce.unit in opens.get(now, ()) for _, reduce in held):
            program += [reduce for _, reduce in held]
            in_flight, held = in_flight + held, []
        # Where gradient buffers are needed others may be taken by one stage alone: by its reduces under way, of no unit that
        # is needed, or by what it has left for later.
        left, newest = now > 0 and getattr(uses[now - 1], "inputs_only", False), in_flight[-1][0] if in_flight else now
        while opens.get(now) and in_flight and (left or in_flight[0][0] < newest or in_flight[0][1].unit in opens[now]):
            _, done = in_flight.pop(0)
            program.append(Finish(done.unit, done.micro_batch))
        program += [*before.get(now, ()), use, *after.get(now, ()), *early, *(reduce for _, reduce in held), *frees.get(now, ())]
        in_flight += held
        held = [(now, Reduce(unit, use.micro_batch)) for unit in last_gradient.get(now, ())]
    program += [reduce for _, reduce in held]
    program += [Finish(reduce.unit, reduce.micro_batch) for _, reduce in in_flight + held]
    return tuple(program)


def _residencies(reads: Sequence[Sequence[str]], micro_batch: Sequence[int],
                 prefetch: int, stay: Stay) -> tuple[dict[int, list[Gather]], dict[int, list[Free]]]:
    """When to gather and when to free: {use before which: gathers}, {use after which: frees}."""
    gathers: dict[int, list[Gather]] = {}
    frees: dict[int, list[Free]] = {}
    times: dict[str, list[int]] = {}
    for now, units in enumerate(reads):
        for unit in units:
            times.setdefault(unit, []).append(now)
    for unit, (first, *later) in times.items():
        start, last, kept = max(0, first - prefetch), first, False
        for again in [*later, None]:
            # Keep it where its next gather would start the moment it is freed, and as long as `stay` says.
            if again is not None and (again - prefetch <= last + 1 or stay is Stay.STEP
                                      or (stay is Stay.MICRO_BATCH and micro_batch[last] == micro_batch[again])):
                last = again
                continue
            gathers.setdefault(start, []).append(Gather(unit, kept))
            kept = stay is Stay.GROUP and again is not None and micro_batch[last] == micro_batch[again]
            frees.setdefault(last, []).append(Free(unit, kept))
            if again is not None:
                start, last = again - prefetch, again
    for start, starting in gathers.items():  # among gathers of one moment, the unit needed first goes first
        starting.sort(key=lambda gather: next(t for t in times[gather.unit] if t >= start))
    return gathers, frees


def _travels(uses: Sequence[Use]) -> tuple[dict[int, list[Fetch]], dict[int, list[Offload | Release]]]:
    """When what a forward keeps goes to the host and comes back: {use before which: copies}, {use after which: copies}.

    It leaves behind the use after its own and arrives during the use before its backward, so that either copy has a use to
    hide behind. Where it would be back as soon as it has left it stays: of the last two stages.
    """
    forward = {(use.stage, use.micro_batch): now for now, use in enumerate(uses) if isinstance(use, Forward)}
    before: dict[int, list[Fetch]] = {}
    after: dict[int, list[Offload | Release]] = {}
    for again, use in enumerate(uses):
        key = use.stage, use.micro_batch
        if isinstance(use, Backward) and again - forward[key] > 3:
            before.setdefault(again - 1, []).append(Fetch(*key))
            after.setdefault(forward[key], []).append(Offload(*key))
            after.setdefault(forward[key] + 1, []).insert(0, Release(*key))
    return before, after


def _gradient_spans(stages: dict[str, Stage], uses: Sequence[Use],
                    reduce_once: bool) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Which units' gradient buffers open before a use, and which are complete after it."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for now, use in enumerate(uses):
        if isinstance(use, Backward | Weights):
            for unit in stages[use.stage].gradients:
                span = unit, 0 if reduce_once else use.micro_batch
                first.setdefault(span, now)
                last[span] = now
    opens: dict[int, list[str]] = {}
    closes: dict[int, list[str]] = {}
    for (unit, _), now in first.items():
        opens.setdefault(now, []).append(unit)
    for (unit, _), now in last.items():
        closes.setdefault(now, []).append(unit)
    return opens, closes


def served(program: Program, stages: Iterable[Stage]) -> dict[int, tuple[int, ...]]:
    """Which micro-batches compute with what a gather brings: {index of the Gather: micro-batches}."""
    reads = {stage.name: (stage.reads, stage.backward_reads) for stage in stages}
    found: dict[int, dict[int, None]] = {}
    opened: dict[str, int] = {}
    for index, instruction in enumerate(program):
        if isinstance(instruction, Gather):
            opened[instruction.unit], found[index] = index, {}
        elif isinstance(instruction, Forward | Backward):
            for unit in reads[instruction.stage][isinstance(instruction, Backward)]:
                found[opened[unit]][instruction.micro_batch] = None
    return {index: tuple(micro_batches) for index, micro_batches in found.items()}


# -- buffers ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Slots:
    """A fixed set of buffers for a program, so that nothing is allocated during a step.

    sizes: elements of each buffer. taken: which buffer serves which opening: the index of a Gather for gathered
    units, (unit, micro-batch) for gradients.
    """

    sizes: tuple[int, ...]
    taken: dict[Hashable, int]


def full_slots(program: Program, sizes: Mapping[str, int]) -> Slots:
    """Slots for gathered units: taken at Gather, given back at Free. sizes: {unit: padded elements}."""
    spans: dict[Hashable, tuple[int, int, int]] = {}
    opened: dict[str, int] = {}
    for index, instruction in enumerate(program):
        if isinstance(instruction, Gather):
            opened[instruction.unit] = index
        elif isinstance(instruction, Free):
            first = opened.pop(instruction.unit)
            spans[first] = (first, index, sizes[instruction.unit])
    return _assign(spans)


def gradient_slots(program: Program, stages: Iterable[Stage], sizes: Mapping[str, int]) -> Slots:
    """Slots for full gradients: taken at the first Backward that writes to them, given back at Finish.

    taken: by (unit, micro-batch of that Backward).
    """
    gradients = {stage.name: stage.gradients for stage in stages}
    opened: dict[str, tuple[int, int]] = {}
    reducing: dict[str, tuple[int, int]] = {}
    spans: dict[Hashable, tuple[int, int, int]] = {}
    for index, instruction in enumerate(program):
        if isinstance(instruction, Backward):
            for unit in gradients[instruction.stage]:
                opened.setdefault(unit, (index, instruction.micro_batch))
        elif isinstance(instruction, Reduce):
            reducing[instruction.unit] = opened.pop(instruction.unit)
        elif isinstance(instruction, Finish):
            first, mb = reducing.pop(instruction.unit)
            spans[instruction.unit, mb] = (first, index, sizes[instruction.unit])
    return _assign(spans)


def _assign(spans: Mapping[Hashable, tuple[int, int, int]]) -> Slots:
    """Give each (first, last, size) a buffer that is free from first to last: the smallest that fits, else the one
    that has to grow least, else a new one."""
    sizes: list[int] = []
    busy_until: list[int] = []
    taken: dict[Hashable, int] = {}
    for key, (first, last, size) in sorted(spans.items(), key=lambda item: item[1]):
        free = [slot for slot in range(len(sizes)) if busy_until[slot] < first]
        slot = min(free, key=lambda s: (max(size - sizes[s], 0), sizes[s], s), default=len(sizes))
        if slot == len(sizes):
            sizes.append(0)
            busy_until.append(-1)
        sizes[slot], busy_until[slot] = max(sizes[slot], size), last
        taken[key] = slot
    return Slots(tuple(sizes), taken)
