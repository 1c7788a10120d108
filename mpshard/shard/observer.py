"""What may watch a running program: the engine and the units call it, if there is one, and know nothing of it."""

from __future__ import annotations

from typing import Protocol

from mpshard.shard.schedule import Instruction


class Observer(Protocol):
    """Told of everything that took time, once it is over. Times are seconds of time.perf_counter."""

    def ran(self, index: int, instruction: Instruction, start: float, end: float) -> None:
        """Instruction `index` of the program has been executed (a gather or reduce: started)."""

    def gathered(self, unit: str, start: float, end: float) -> None:
        """A gather was under way from `start` until its completion was seen at `end`."""

    def reduced(self, unit: str, start: float, end: float) -> None:
        """So was a reduce."""

    def waited(self, unit: str, start: float, end: float) -> None:
        """Compute stood still for the unit's gather, reduce or gradient buffer."""
