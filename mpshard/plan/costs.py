"""Bytes and messages of a step, counted on the program."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpshard.config import ConfigError
from mpshard.device.base import Kind
from mpshard.nn.module import Model
from mpshard.shard.grouping import group, stages_of, tables_of
from mpshard.shard.layout import Layout, Segment, Table, lay_out
from mpshard.shard.options import Options, refuse
from mpshard.shard.precision import DTYPES, Plain
from mpshard.shard.schedule import (
    Finish,
    Free,
    Gather,
    Program,
    Reduce,
    forward_program,
    full_slots,
    gradient_slots,
    served,
    training_program,
)


@dataclass(frozen=True)
class Plan:
    """What one rank holds and moves.

    bytes: held through a run of steps, by kind; of gathered units and full gradients what the fixed buffers take.
        Staging and activations come on top (see `activation_bytes`); they come and go.
    gathers, reduces: collectives a step. bytes_gathered, bytes_reduced: what a rank must receive for gathers, and send
        for reduces, a step: (ranks - 1) slices each; of a table that travels by rows at most, which tokens are named twice
        is not known here.
    """

    program: Program
    bytes: Mapping[Kind, int]
    gathers: int
    reduces: int
    bytes_gathered: int
    bytes_reduced: int

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Topology:
    """Who holds what: `ranks` in all, `group` of them around one copy of the weights, `node` of those sharing memory."""

    ranks: int
    group: int
    node: int
    shares_memory: bool

    @property
    def replicas(self) -> int:
        return self.ranks // self.group

    @property
    def in_place(self) -> bool:
        """Whether units can be read where their slices lie."""
        return self.shares_memory and self.node == self.group


def topology(options: Options, ranks: int, ranks_on_node: int = 0) -> Topology:
    """ranks_on_node: 0, all of them. The rules are those of `mpshard.shard`."""
    node = ranks_on_node or ranks
    size = ranks
    if options.strategy == "hybrid":
        size = options.dp_shard or (ranks // options.dp_replicate if options.dp_replicate else node)
        if ranks % size or (options.dp_replicate and size * options.dp_replicate != ranks):
            raise ConfigError(f"mesh.dp_shard x mesh.dp_replicate does not multiply out to {ranks} ranks; use divisors of it that do, "
                              "or 0 for one of them")
    if options.keep_ranks and (options.keep_ranks >= size or size % options.keep_ranks):
        raise ConfigError(f"shard.reshard_after_forward={options.keep_ranks} is no divisor of the {size} ranks of a unit, or all of them")
    shares = options.transport == "shm" or not (options.wants_messages or (node == 1 and size > 1))
    return Topology(ranks, size, min(node, size), shares and not options.replicated)


def plan(model: Model, options: Options, ranks: int, micro_batches: int = 1, *, rank: int = 0, ranks_on_node: int = 0,
         moments: int = 2, moment_dtype: Any = "float32", single: Container[str] = (), average: bool = False, evaluates: bool = False,
         on_host: bool = True, tokens: int = 0) -> Plan:
    """Count a step of `micro_batches` on `rank` of `ranks`.

    moments: arrays that the optimizer keeps a parameter (AdamW 2, SGD with momentum 1), `moment_dtype` each; of those in
    `single` it keeps one (Muon's matrices). average: there is a running average of the weights.
    evaluates: the run also executes the forward program, whose buffers may be others. on_host: False for a GPU, whose
    programs lag and which computes in 16 bits where weights arrive so. tokens: of a micro-batch; 0: not known, it may name every
    row of a table.
    """
    refuse(options, model, on_host)
    topo = topology(options, ranks, ranks_on_node)
    if not on_host:  # nobody shares a GPU's memory; a unit that is not cut lies whole in its slice
        topo = replace(topo, shares_memory=topo.group == 1)
    count = Count(options, topo, on_host)
    groups = group(model, options.unit)
    layouts = {g.name: lay_out([(p.name, p.shape) for p in g.parameters], 1 if options.replicated else ranks) for g in groups}
    stages, lag = stages_of(model, groups), 0 if on_host else 1
    offload = options.offloads_activations and not on_host
    weights_last = ranks > 1 and not (topo.in_place or options.replicated or offload)
    program = training_program(stages, micro_batches, options.prefetch, options.stay, options.reduce_once, lag, offload, weights_last)
    padded = {name: layout.padded_size for name, layout in layouts.items()}
    gathered = [full_slots(program, padded).sizes]
    if evaluates:
        gathered.append(full_slots(forward_program(stages, options.prefetch, lag), padded).sizes)
    learning = {g.name: layouts[g.name] for g in groups if g.trainable}
    partial = partial_sums(program, {name: layout.shard_size for name, layout in learning.items()}) if options.deterministic else 0
    held = {
        Kind.PARAMETER: sum(map(count.parameters, layouts.values())),
        Kind.GRADIENT: sum(map(count.gradients, learning.values())) + partial * count.master,
        Kind.MOMENT: 0 if count.away else
                     sum(s.size * (1 if s.name in single else moments) for layout in learning.values()
                         for s in count.owned(layout, rank)) * np.dtype(moment_dtype).itemsize
                     + sum(layout.shard_size for layout in learning.values()) * average * count.master,
        Kind.GATHERED: count.full_buffers(largest_slots(gathered)) + sum(
            count.kept(layouts[name]) for name in {i.unit for i in program if isinstance(i, Free) and i.keep}),
        Kind.FULL_GRADIENT: sum(gradient_slots(program, stages, padded).sizes) * count.gradient}
    tables = {unit: layouts[unit].table(parameter.name, topo.group) for unit, parameter in tables_of(model, groups).items()
              if tokens and options.sends_rows(on_host and not topo.shares_memory, topo.node < topo.group)}
    serves, parts = served(program, stages), micro_batches if options.reduce_once else 1
    gathers = [count.sent_by_gather(layouts[i.unit], i.kept, tables.get(i.unit), tokens * len(serves[index]))
               for index, i in enumerate(program) if isinstance(i, Gather)]
    reduces = [count.sent_by_reduce(layouts[i.unit], tables.get(i.unit), tokens * parts) for i in program if isinstance(i, Reduce)]
    reduced = sum(reduces) + sum(map(count.sent_to_replicas, learning.values()))
    return Plan(program, held, len(gathers), len(reduces), sum(gathers), reduced)


class Count:
    """Bytes of one unit, given its layout.

    master, full, gradient: bytes of an element of a slice, of a gathered unit, of its gradient. away: masters, where gathers do
        not send them, and moments are in the host's memory.
    """

    def __init__(self, options: Options, topo: Topology, on_host: bool) -> None:
        p = options.precision
        self.replicated, self.topo, self.wire, self.keep_ranks = options.replicated, topo, p.wire, options.keep_ranks
        self.replicas = 1 if options.replicated else topo.replicas
        self.away = options.offloads_optimizer and not on_host
        arithmetic = DTYPES[p.master if on_host else p.param]
        self.master, self.full = DTYPES[p.master].itemsize, arithmetic.itemsize
        self.gradient, self.reduced = DTYPES[p.master if on_host else p.reduce].itemsize, DTYPES[p.reduce].itemsize
        plain = isinstance(self.wire, Plain)
        self.travels_as_it_is = plain and self.wire.dtype == arithmetic
        self.sends_masters = plain and self.wire.dtype == DTYPES[p.master] and self.replicas == 1

    def sent(self, layout: Layout) -> int:
        """What a rank contributes to a gather: its slice as it travels, with those of its replicas."""
        return self.wire.size(layout.shard_size) * self.wire.dtype.itemsize * self.replicas

    def parameters(self, layout: Layout) -> int:
        return self.sent(layout) + (0 if self.sends_masters or self.away else layout.shard_size * self.master)

    def gradients(self, layout: Layout) -> int:
        """The slice and, under hybrid sharding, what is summed in the group before."""
        return (1 + (self.replicas if self.replicas > 1 else 0)) * layout.shard_size * self.master

    def kept(self, layout: Layout) -> int:
        """A rank's part of a unit that stays among `keep_ranks` of them from forward to backward."""
        return self.sent(layout) * (self.topo.group // self.keep_ranks)

    def owned(self, layout: Layout, rank: int) -> tuple[Segment, ...]:
        """What the slice of `rank` holds of parameters, without padding."""
        index, place = divmod(rank, self.topo.group)
        return layout.segments(0 if self.replicated else place * self.topo.replicas + index)

    def full_buffers(self, slots: Sequence[int]) -> int:
        """Buffers for `slots` gathered elements each; one that a node shares counts in equal parts."""
        in_place = self.topo.in_place or self.replicated
        sharing = self.topo.node if self.topo.shares_memory else 1
        if self.travels_as_it_is:
            return 0 if in_place else sum(size * self.full // sharing for size in slots)
        slices = 1 if self.replicated else self.topo.ranks
        words = [self.wire.size(size // slices) * slices * self.wire.dtype.itemsize // sharing for size in slots]
        return sum(slots) * self.full + (0 if in_place else sum(words))

    def sent_by_gather(self, layout: Layout, kept: bool = False, table: Table | None = None, tokens: int = 0) -> int:
        if kept:
            return (self.keep_ranks - 1) * self.kept(layout)
        if table is not None:
            asking = (self.topo.group - 1) * max(-(-len(table.whole(rank)) // 8) for rank in range(self.topo.group))
            return asking + self._of_rows(table, tokens) * self.wire.dtype.itemsize
        return 0 if self.replicated else (self.topo.group - 1) * self.sent(layout)

    def _of_rows(self, table: Table, tokens: int) -> int:
        """Elements that at most come to the worst-placed rank when so many tokens name rows: all that is no row, and these."""
        rows = [len(table.whole(rank)) for rank in range(self.topo.group)]
        others = [(self.topo.group - 1) * table.slice_size - (sum(rows) - own) * table.width
                  + min(tokens, sum(rows) - own) * table.width for own in rows]
        return max(others)

    def sent_by_reduce(self, layout: Layout, table: Table | None = None, tokens: int = 0) -> int:
        if table is not None:
            return self._of_rows(table, tokens) * self.reduced
        if self.replicated:  # a ring all-reduce
            return 2 * (self.topo.ranks - 1) * (layout.padded_size * self.reduced // self.topo.ranks)
        return layout.padded_size // self.topo.group * (self.topo.group - 1) * self.reduced

    def sent_to_replicas(self, layout: Layout) -> int:
        """Once a step, under hybrid sharding: the groups exchange their sums."""
        return (self.replicas - 1) * layout.shard_size * self.master


def largest_slots(programs: Sequence[Sequence[int]]) -> list[int]:
    """Sizes of buffers that serve several programs, one after another: the largest of each for the largest."""
    ordered = [sorted(sizes, reverse=True) for sizes in programs]
    return [max(sizes[place] for sizes in ordered if place < len(sizes)) for place in range(max(map(len, ordered)))]


def partial_sums(program: Program, slice_sizes: Mapping[str, int]) -> int:
    """Elements of the partial sums that deterministic accumulation holds at its worst: see `mpshard.shard.gradient`."""
    counts: dict[str, list[int]] = {}  # of each unit: how many micro-batches each of its partial sums covers
    last = {i.unit: index for index, i in enumerate(program) if isinstance(i, Finish)}
    held = worst = 0
    for index, instruction in enumerate(program):
        if isinstance(instruction, Reduce):
            held += slice_sizes[instruction.unit]
            worst = max(worst, held)
        elif isinstance(instruction, Finish):
            partial = counts.setdefault(instruction.unit, [])
            count = 1
            while partial and partial[-1] == count:
                count += partial.pop()
                held -= slice_sizes[instruction.unit]
            partial.append(count)
            if index == last[instruction.unit]:  # joined, and copied to the slice
                held -= len(partial) * slice_sizes[instruction.unit]
    return worst
