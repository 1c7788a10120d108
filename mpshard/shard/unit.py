"""A unit of sharding: the flat vector of a module's parameters, of which this rank owns one slice.

A unit goes SHARDED -> GATHERING -> FULL -> SHARDED, and its parameters can be read only while it is FULL. Its
gradient has a life of its own, see `mpshard.shard.gradient`.

Note on copies of a slice. `shard` is the master, in full precision. What a gather sends is the store: the master
itself where weights travel as they are, else the master written in another format (`Wire`) or, under hybrid sharding,
together with the slices of the ranks that hold replicas. `publish` brings the store up to date after an update. Where the
store is another array than the master, the master may live in the host's memory: see `mpshard.device.lasting`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

import numpy as np

from mpshard.autograd.tensor import Parameter, bind_all
from mpshard.comm.collectives import Pending, Progress
from mpshard.comm.mesh import Mesh
from mpshard.comm.rows import RowMessages
from mpshard.comm.transport import Slot, Store, Transport
from mpshard.device.base import Array, Device, Kind
from mpshard.device.lasting import Lasting
from mpshard.shard.gradient import UnitGradient
from mpshard.shard.grouping import Group
from mpshard.shard.layout import Layout, Segment, joined, lay_out
from mpshard.shard.observer import Observer
from mpshard.shard.precision import DTYPES, Plain, Precision


class State(Enum):
    SHARDED = auto()
    GATHERING = auto()
    FULL = auto()


class Unit:
    """One flat vector.

    Attributes
    ----------
    layout: where each parameter lies; `segments` is this rank's part of it.
    master: this rank's slice (m,) of the weights in full precision, the lasting copy.
    owned: the segments that this rank writes to a checkpoint: all of its own, or where ranks hold the same, a share.
    owned_places: where in the slice those are, neighbours joined.
    gradients: this rank's slice of the gradient, and how it comes about; None for a unit that does not learn.
    """

    def __init__(self, group: Group, mesh: Mesh, transport: Transport, progress: Progress, device: Device,
                 precision: Precision, *, replicated: bool, deterministic: bool, master_away: bool = False,
                 neighbours: Transport | None = None, between: Transport | None = None) -> None:
        self.name, self.parameters = group.name, list(group.parameters)
        self.mesh, self.transport, self.progress, self.device = mesh, transport, progress, device
        shapes = [(p.name, p.shape) for p in group.parameters]
        self.layout: Layout = lay_out(shapes, 1 if replicated else mesh.world)
        self.segments = self.layout.segments(0 if replicated else mesh.slice)
        self.owned = _share(self.segments, mesh) if replicated else self.segments
        self.owned_places = joined(self.owned)
        self.dtype, self.wire = DTYPES[precision.master], precision.wire
        self.replicas = 1 if replicated else mesh.replicas.size
        m = self.layout.shard_size
        self.store = transport.store(self.wire.size(m) * self.replicas, self.wire.dtype, Kind.PARAMETER)
        self.computes_in, self.gradient_in = precision.arithmetic(device), precision.gradient(device)
        self.travels_as_it_is = isinstance(self.wire, Plain) and self.wire.dtype == self.computes_in
        self.is_published = isinstance(self.wire, Plain) and self.wire.dtype == self.dtype and self.replicas == 1
        self.master = (Lasting.of(device, self.store.local) if self.is_published
                       else Lasting(device, m, self.dtype, Kind.PARAMETER, master_away))
        self.gradients = UnitGradient(group, self.layout, mesh, transport, progress, device, precision,
                                      between=between, deterministic=deterministic) if group.trainable else None
        self.state, self.observer = State.SHARDED, None
        self.audit: Callable[[Unit, Array], None] | None = None  # sees the full vector before it is freed
        self.rows: RowMessages | None = None
        places = {p.name: p for p in self.layout.placements}
        self.views = [(p, places[p.name].offset, p.size) for p in group.parameters]
        self.views += [(p, places[p.parts[0].name].offset, p.size) for p in group.fused]
        self._viewed = [parameter for parameter, _, _ in self.views]
        self._no_views: list[Array | None] = [None] * len(self.views)
        for fused in group.fused:
            _check_adjacent(self.name, fused, self.layout)
        self._gather: Pending | None = None
        self._full: Array | None = None
        self._cut: tuple[Array | None, list[Array]] = (None, [])
        self._slots: tuple[Slot | None, Slot | None] = (None, None)
        self.neighbours = neighbours  # the few ranks that keep the unit among themselves from forward to backward
        self.between = between  # under hybrid sharding: the ranks that hold replicas
        self._kept: Store | None = None
        self._keeps = False

    @property
    def observer(self) -> Observer | None:
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        if self.gradients is not None:
            self.gradients.observer = observer

    @property
    def shard(self) -> Array:
        """The master's array, where it is now."""
        return self.master.array

    @property
    def gradient(self) -> Array:
        """This rank's slice (m,) of the step's gradient of the sum of token losses."""
        return self.gradients.shard

    @property
    def full(self) -> Array:
        """The full vector (padded_size,), while the unit is FULL."""
        self._expect(State.FULL, "be read")
        return self._full

    @property
    def learns(self) -> bool:
        return self.gradients is not None

    def _expect(self, state: State, verb: str) -> None:
        if self.state is not state:
            raise RuntimeError(f"unit {self.name} cannot {verb}: it is {self.state.name}, not {state.name}")

    # -- weights -----------------------------------------------------------------------------
    def publish(self) -> Pending | None:
        """Start to bring what gathers send up to date with the master; wait for the result, if there is one."""
        words = self.store.local
        if self.between is None:
            if not self.is_published:
                self.wire.encode(self.device, self.shard, words)
            self.store.written()
            return None
        own = self.between.store(self.wire.size(self.layout.shard_size), self.wire.dtype, Kind.STAGING)
        self.wire.encode(self.device, self.shard, own.local)
        own.written()
        return self.between.gather(own, self.between.holding(words)).afterwards(self.store.written)

    def travel_by_rows(self, rows: RowMessages) -> None:
        """From now on gathers bring of a table the rows that they are asked for alone."""
        self.rows = rows
        if self.gradients is not None:
            self.gradients.rows = rows

    def start_gather(self, slot: Slot | None, words: Slot | None = None, kept: bool = False,
                     ids: Mapping[int, Array] | None = None) -> None:
        """Start collecting the full vector; if `kept` from the neighbours, who have freed it so.

        slot: where it will be, at least padded_size elements; None if it can be read where the slices lie.
        words: where they are collected first, if they travel in another format and not in place.
        ids: {micro-batch: tokens that will be looked up}, for a unit that can travel by rows; None: all rows are wanted.
        """
        self._expect(State.SHARDED, "gather")
        self.state, self._slots = State.GATHERING, (slot, words)
        place = slot if self.travels_as_it_is else words
        if self.rows is not None and ids is not None and self.audit is None and not kept:
            assert place is not None
            self._gather = self.rows.gather(self.store, place, ids)
            return
        if not kept:
            self._gather = self.transport.gather(self.store, place)
            return
        if not self._keeps:
            raise RuntimeError(f"unit {self.name} cannot be gathered from neighbours: they have not kept it")
        self._gather, self._keeps = self.neighbours.gather(self._kept, place), False

    def wait_full(self) -> tuple[float, float]:
        """Make sure that the unit is FULL. Returns the seconds waited and, if it was this call that completed the
        gather, the seconds it was under way."""
        if self.state is State.FULL:
            return 0.0, 0.0
        self._expect(State.GATHERING, "be read")
        start = time.perf_counter()
        self._full = self._gather.wait()
        gather, end = self._gather, time.perf_counter()
        if not self.travels_as_it_is:
            words, (slot, received) = self._full, self._slots
            self._full = slot.array[: self.layout.padded_size]
            self.wire.decode(self.device, words, self._full, self.layout.world)
            self.transport.release(received)
        bind_all(self._viewed, self._weights())
        self._gather, self.state = None, State.FULL
        if self.observer is not None:
            self.observer.gathered(self.name, gather.started, gather.finished)
            self.observer.waited(self.name, start, end)
        return end - start, gather.seconds

    def _weights(self) -> list[Array]:
        """The parameters in the full vector; where that lies in one place for ever, cut once."""
        if self._full is self._cut[0]:
            return self._cut[1]
        weights = [self._full[offset:offset + size].reshape(parameter.shape) for parameter, offset, size in self.views]
        if self.transport.in_place and self.travels_as_it_is:
            self._cut = self._full, weights
        return weights

    def free(self, keep: bool = False) -> None:
        """Give the full vector up; the slot's next user may overwrite it at once. keep: but for this rank's part of it
        among its neighbours, 1/k of it in the format that travels."""
        self._expect(State.FULL, "be freed")
        if keep:
            self._keep()
        if self.audit is not None:
            self.audit(self, self._full)
        bind_all(self._viewed, self._no_views)
        slot, _ = self._slots
        if self.device.poison and slot is not None and slot.private:
            self._full.fill(np.nan)
        if self.travels_as_it_is:
            self.transport.release(slot)
        self._full, self._slots, self.state = None, (None, None), State.SHARDED


    def _keep(self) -> None:
        """Write down k-th number `rank among neighbours` of the full vector: some whole slices, as they came."""
        m, slices = self.layout.shard_size, self.layout.world // self.neighbours.comm.size
        words, first = self.wire.size(m), self.neighbours.comm.rank * slices
        if self._kept is None:
            self._kept = self.neighbours.store(words * slices, self.wire.dtype, Kind.GATHERED)
        for number in range(slices):
            source = self._full[(first + number) * m:(first + number + 1) * m]
            self.wire.encode(self.device, source, self._kept.local[number * words:(number + 1) * words])
        self._kept.written()
        self._keeps = True


def _check_adjacent(unit: str, fused: Parameter, layout: Layout) -> None:
    """A fused parameter's parts must lie next to each other, or the view would read others."""
    places = {p.name: p for p in layout.placements}
    offset = places[fused.parts[0].name].offset
    for part in fused.parts:
        if places[part.name].offset != offset:
            raise ValueError(f"unit {unit}: {part.name} does not follow its neighbour in {fused.name}")
        offset += part.size


def _share(segments: Sequence[Segment], mesh: Mesh) -> tuple[Segment, ...]:
    """This rank's share of what every rank holds: one of `world` contiguous ranges, cut at element borders."""
    total = segments[-1].offset + segments[-1].size if segments else 0
    lo, hi = (total * i // mesh.world for i in (mesh.rank, mesh.rank + 1))
    found = []
    for s in segments:
        first, last = max(lo, s.offset), min(hi, s.offset + s.size)
        if first < last:
            found.append(Segment(s.name, s.start + first - s.offset, s.start + last - s.offset, first))
    return tuple(found)
