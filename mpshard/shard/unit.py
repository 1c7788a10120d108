"""A unit of sharding: the flat vector of one module's parameters, of which this rank owns one slice.

A unit goes SHARDED -> GATHERING -> FULL -> SHARDED, and its parameters can be read only while it is FULL. Its
gradient has a life of its own: closed -> open (a buffer that backward writes to) -> reducing -> closed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import numpy as np

from mpshard.autograd.tensor import Parameter
from mpshard.comm.collectives import Pending
from mpshard.comm.transport import Slot, Transport
from mpshard.device.base import Array, Device, Kind
from mpshard.shard.layout import Layout, lay_out
from mpshard.shard.observer import Observer


class State(Enum):
    SHARDED = auto()
    GATHERING = auto()
    FULL = auto()


class Unit:
    """One flat vector per unit.

    Attributes
    ----------
    layout: where each parameter lies; `segments` is this rank's part of it.
    shard (m,): this rank's slice of the weights, the only lasting copy.
    gradient (m,): this rank's slice of the gradient, summed over ranks and over the micro-batches of the step.
    has_gradient: False until the step's first reduce has been finished: `gradient` still holds the last step's.
    """

    def __init__(self, name: str, parameters: Sequence[Parameter], fused: Sequence[Parameter],
                 rank: int, world: int, transport: Transport, device: Device, dtype: Any) -> None:
        self.name, self.parameters, self.device, self.transport = name, list(parameters), device, transport
        self.layout: Layout = lay_out([(p.name, p.shape) for p in parameters], world)
        self.segments = self.layout.segments(rank)
        self.dtype = np.dtype(dtype)
        self.store = transport.store(self.layout.shard_size, dtype, Kind.PARAMETER)
        self.shard = self.store.local
        self.gradient = device.zeros(self.layout.shard_size, dtype, Kind.GRADIENT)
        self.has_gradient = False
        self.state = State.SHARDED
        self.observer: Observer | None = None
        self._views = [(p, place.offset, p.size) for p, place in zip(parameters, self.layout.placements, strict=True)]
        self._views += [(p, self._fused_offset(p), p.size) for p in fused]
        self._gather: Pending | None = None
        self._reduce: Pending | None = None
        self._full: Array | None = None
        self._full_slot: Slot | None = None
        self._gradient_slot: Slot | None = None
        self._full_gradient: Array | None = None

    def _fused_offset(self, fused: Parameter) -> int:
        """Where a fused parameter begins; its parts must lie next to each other, or the view would read others."""
        place = {p.name: p for p in self.layout.placements}
        first = offset = place[fused.parts[0].name].offset
        for part in fused.parts:
            if place[part.name].offset != offset:
                raise ValueError(f"unit {self.name}: {part.name} does not follow its neighbour in {fused.name}")
            offset += part.size
        return first

    def _expect(self, state: State, verb: str) -> None:
        if self.state is not state:
            raise RuntimeError(f"unit {self.name} cannot {verb}: it is {self.state.name}, not {state.name}")

    # -- weights -----------------------------------------------------------------------------
    def start_gather(self, slot: Slot | None) -> None:
        """Start collecting the full vector in `slot` (at least padded_size elements), None if the transport needs none."""
        self._expect(State.SHARDED, "gather")
        self.state, self._full_slot = State.GATHERING, slot
        self._gather = self.transport.gather(self.store, slot)

    def wait_full(self) -> tuple[float, float]:
        """Make sure that the unit is FULL. Returns the seconds waited and, if it was this call that completed the
        gather, the seconds it was under way."""
        if self.state is State.FULL:
            return 0.0, 0.0
        self._expect(State.GATHERING, "be read")
        start = time.perf_counter()
        self._full = self._gather.wait()
        for parameter, offset, size in self._views:
            parameter.bind(self._full[offset:offset + size].reshape(parameter.shape))
        gather, self._gather, self.state, end = self._gather, None, State.FULL, time.perf_counter()
        if self.observer is not None:
            self.observer.gathered(self.name, gather.started, gather.finished)
            self.observer.waited(self.name, start, end)
        return end - start, gather.seconds

    def free(self) -> None:
        """Give the full vector up; the slot's next user may overwrite it at once."""
        self._expect(State.FULL, "be freed")
        for parameter, _, _ in self._views:
            parameter.bind(None)
        if self.device.poison and self._full_slot is not None and self._full_slot.private:
            self._full.fill(np.nan)
        self.transport.release(self._full_slot)
        self._full, self._full_slot, self.state = None, None, State.SHARDED

    # -- gradients ---------------------------------------------------------------------------
    @property
    def gradient_is_open(self) -> bool:
        """Whether backward may write: a buffer is attached and its reduce has not been started."""
        return self._full_gradient is not None and self._reduce is None

    def open_gradient(self, slot: Slot) -> float:
        """Attach the buffer that backward writes this micro-batch's gradient to. Its content is not read.

        Returns the seconds waited for others to have read what it held."""
        if self._full_gradient is not None:
            raise RuntimeError(f"unit {self.name} cannot open a gradient: its last one has not been finished")
        start = time.perf_counter()
        slot.acquire()
        waited = time.perf_counter() - start
        if self.observer is not None:
            self.observer.waited(self.name, start, start + waited)
        self._gradient_slot, self._full_gradient = slot, slot.array[: self.layout.padded_size]
        for parameter, offset, size in self._views:
            parameter.bind_grad(self._full_gradient[offset:offset + size].reshape(parameter.shape))
        return waited

    def start_reduce(self) -> None:
        """Start summing the gradient over ranks. Parameters that backward did not reach count as zero."""
        full = self._full_gradient
        full[self.layout.size:] = 0
        for parameter, offset, size in self._views:
            if not parameter.grad_started and not parameter.parts:
                full[offset:offset + size] = 0
        for parameter, _, _ in self._views:
            parameter.bind_grad(None)
        self._reduce = self.transport.reduce(self._gradient_slot, full.size, self.gradient, self.has_gradient)
        self.has_gradient = True

    def finish_reduce(self) -> tuple[float, float]:
        """Wait until this rank's slice of the sum is in `gradient`. Returns seconds waited and under way."""
        start = time.perf_counter()
        self._reduce.wait()
        waited, in_flight = time.perf_counter() - start, self._reduce.seconds
        if self.observer is not None:
            self.observer.reduced(self.name, self._reduce.started, self._reduce.finished)
            self.observer.waited(self.name, start, start + waited)
        if self.device.poison and self._gradient_slot.private:
            self._full_gradient.fill(np.nan)
        self._reduce = self._full_gradient = self._gradient_slot = None
        return waited, in_flight
