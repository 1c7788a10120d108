"""A unit's gradient: from the buffer that backward fills, over the ranks, into this rank's slice.

It is closed -> open (a buffer is attached that backward writes to) -> reducing -> closed, once a micro-batch or, where
gradients are accumulated before they travel, once a step.
"""

from __future__ import annotations

import time

import numpy as np

from mpshard.autograd.tensor import bind_all_grads
from mpshard.comm.collectives import Pending, Progress
from mpshard.comm.mesh import Mesh
from mpshard.comm.rows import RowMessages
from mpshard.comm.transport import Slot, Transport
from mpshard.device.base import Array, Device, Kind
from mpshard.shard.grouping import Group
from mpshard.shard.layout import Layout
from mpshard.shard.observer import Observer
from mpshard.shard.precision import DTYPES, Precision


class UnitGradient:
    """Sums one unit's gradient over micro-batches and ranks.

    Attributes
    ----------
    shard (m,): this rank's slice of the step's sum, complete after `settle`.

    Note on determinism. Floating-point sums depend on their order, and the order on the number of ranks, unless it is
    one fixed tree over the global micro-batches g = m * world + rank. With a power of two ranks, the ranks of one m are a
    complete subtree, which the transport sums as such; over m a binary counter of partial sums builds the same tree
    that one rank alone would build: partial sums of equal size are joined as soon as there are two. It costs log2 of
    the number of micro-batches more slices.
    """

    def __init__(self, group: Group, layout: Layout, mesh: Mesh, transport: Transport, progress: Progress,
                 device: Device, precision: Precision, *, between: Transport | None, deterministic: bool) -> None:
        self.name, self.layout, self.mesh, self.transport, self.progress = group.name, layout, mesh, transport, progress
        self.device, self.deterministic, self.between = device, deterministic, between
        self.dtype, self.travels_as = DTYPES[precision.master], DTYPES[precision.reduce]
        self.shard = device.zeros(layout.shard_size, self.dtype, Kind.GRADIENT)
        # Under hybrid sharding: what is summed inside the group of ranks, before the groups sum theirs.
        self.of_group = self.shard if between is None else device.zeros(layout.shard_size * mesh.replicas.size, self.dtype, Kind.GRADIENT)
        places = {p.name: p for p in layout.placements}
        self.views = [(p, places[p.name].offset, p.size) for p in group.parameters]
        self.views += [(p, places[p.parts[0].name].offset, p.size) for p in group.fused]
        self._viewed = [parameter for parameter, _, _ in self.views]
        self._no_views: list[Array | None] = [None] * len(self.views)
        self.observer: Observer | None = None
        self.rows: RowMessages | None = None  # where of a table only rows travel
        self.begin()
        self._slot: Slot | None = None
        self._full: Array | None = None
        self._reduce: Pending | None = None
        self._settle: Pending | None = None
        self._summed: Array | None = None

    def begin(self) -> None:
        """A new step: what `shard` holds is the last step's."""
        self.is_started, self.reduced = False, 0  # micro-batches reduced so far
        if self.rows is not None:
            self.rows.begin()
        self.partial: list[tuple[int, Array]] = []  # deterministic: (micro-batches summed, their sum), sizes falling

    @property
    def full(self) -> Array:
        """The buffer (padded_size,) that backward writes to, while it is open."""
        if self._full is None:
            raise RuntimeError(f"unit {self.name} has no buffer for a gradient")
        return self._full

    @property
    def is_open(self) -> bool:
        """Whether backward may write: a buffer is attached and its reduce has not been started."""
        return self._full is not None and self._reduce is None

    def open(self, slot: Slot) -> float:
        """Attach the buffer that backward writes to. Its content is not read.

        Returns the seconds waited for others to have read what it held."""
        if self._full is not None:
            raise RuntimeError(f"unit {self.name} cannot open a gradient: its last one has not been finished")
        start = time.perf_counter()
        slot.acquire()
        waited = time.perf_counter() - start
        if self.observer is not None:
            self.observer.waited(self.name, start, start + waited)
        self._slot, self._full = slot, slot.array[: self.layout.padded_size]
        self._full[self.layout.size:] = 0
        if self.name not in slot.cuts:
            slot.cuts[self.name] = [self._full[offset:offset + size].reshape(parameter.shape) for parameter, offset, size in self.views]
        bind_all_grads(self._viewed, slot.cuts[self.name])
        return waited

    def written(self) -> None:
        """Backward has issued what it adds to the buffer for now."""
        self._slot.written()

    def start_reduce(self, micro_batch: int) -> None:
        """Start summing over ranks what came since the last time, up to this micro-batch. Parameters that backward did not
        reach count as zero."""
        full = self._full
        for parameter, offset, size in self.views:
            if not parameter.grad_started and not parameter.parts:
                full[offset:offset + size] = 0
                self._slot.written()
        bind_all_grads(self._viewed, self._no_views)
        if self.deterministic:
            self._summed = self.device.empty(self.of_group.size, self.dtype, Kind.GRADIENT)
        out, accumulate = (self._summed, False) if self.deterministic else (self.of_group, self.is_started)
        since, self.reduced = range(self.reduced, micro_batch + 1), micro_batch + 1
        if self.rows is not None and self.rows.knows(since):
            self._reduce = self.rows.reduce(self._slot, full.size, out, accumulate, self.travels_as, since)
        else:
            self._reduce = self.transport.reduce(self._slot, full.size, out, accumulate, self.travels_as)
        self.is_started = True

    def finish(self) -> tuple[float, float]:
        """Wait until the sum over ranks has been added to this rank's slice. Returns seconds waited and under way."""
        start = time.perf_counter()
        self._reduce.wait()
        waited, in_flight = time.perf_counter() - start, self._reduce.seconds
        if self.observer is not None:
            self.observer.reduced(self.name, self._reduce.started, self._reduce.finished)
            self.observer.waited(self.name, start, start + waited)
        if self.device.poison and self._slot.private:
            self._full.fill(np.nan)
        self._reduce = self._full = self._slot = None
        if self.deterministic:
            self._carry(1, self._summed)
            self._summed = None
        return waited, in_flight

    def _carry(self, count: int, total: Array) -> None:
        """Binary counter: join partial sums of equal size, earlier + later."""
        while self.partial and self.partial[-1][0] == count:
            _, earlier = self.partial.pop()
            self.device.add(earlier, total)
            count, total = 2 * count, earlier
        self.partial.append((count, total))

    def start_settle(self) -> None:
        """The step's last reduce is finished: join what is left, and start summing over the groups if there are several."""
        if self.deterministic:
            _, total = self.partial.pop()
            while self.partial:
                _, earlier = self.partial.pop()
                self.device.add(earlier, total)
                total = earlier
            self.device.cast(total, self.shard)
        if self.between is not None:
            self._settle = self.between.reduce(self.between.holding(self.of_group), self.of_group.size, self.shard, False)

    def settle(self) -> float:
        """Wait until `shard` is complete. Returns the seconds waited."""
        if self._settle is None:
            return 0.0
        start = time.perf_counter()
        self._settle.wait()
        self._settle = None
        return time.perf_counter() - start
