"""Which rank do the others wait for? A step is as slow as its slowest rank, whatever it is that slows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 20  # steps that are looked at together: one step's hiccup is nobody's fault
COST = 0.1  # share of a step that is worth a word


class Stragglers:
    """Adds up each rank's own work. hosts: of the ranks, in order."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts, self.steps, self.step_s = hosts, 0, 0.0
        self.work = np.zeros(len(hosts))

    def add(self, work: np.ndarray, step_s: float) -> str | None:
        """A step: seconds of work of each rank (N,), without its waits, and of the whole. Every WINDOW steps, one line
        if the slowest rank costs more than COST of the time, else None."""
        self.steps, self.step_s, self.work = self.steps + 1, self.step_s + step_s, self.work + work
        if self.steps < WINDOW:
            return None
        mean, step = self.work / self.steps, self.step_s / self.steps
        self.steps, self.step_s, self.work = 0, 0.0, np.zeros(len(self.hosts))
        slowest, median = int(mean.argmax()), float(np.median(mean))
        lost = float(mean[slowest]) - median
        if lost <= COST * step:
            return None
        return (f"rank {slowest} ({self.hosts[slowest]}) is slow: it works {mean[slowest] * 1e3:,.1f} ms a step, the median rank "
                f"{median * 1e3:,.1f} ms; that is {lost / step:.0%} of a step's {step * 1e3:,.1f} ms")


def spread(values: np.ndarray) -> list[float]:
    """[min, median, max]"""
    return [float(values.min()), float(np.median(values)), float(values.max())]
