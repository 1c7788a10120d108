"""Is this step's loss to be believed? One verdict, the same on all ranks, because loss and norm are global sums."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpshard.config import GuardConfig

ENOUGH = 16  # good steps before anything is called a spike (or guard.window, if that is less)
DEVIATION = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution


@dataclass(frozen=True)
class Verdict:
    """What to do about a step whose update has not been made: "skip" it, "rollback" or "stop". why: in words."""

    action: str
    why: str


class Guard:
    """Judges steps in their order.

    A loss or norm that is not finite falls under guard.nan; one that is over the median of the last good ones by
    guard.spike robust deviations under guard.on_spike. After guard.tries interventions the verdict is "stop"; as many
    good steps in a row as the window holds set the count back.
    """

    def __init__(self, settings: GuardConfig) -> None:
        self.settings, self.tries, self.good = settings, 0, 0
        self.history: dict[str, deque[float]] = {name: deque(maxlen=settings.window) for name in ("loss", "gradient norm")}

    def judge(self, loss: float, norm: float, scaled: bool = False) -> Verdict | None:
        """None for a good step. scaled: gradients are scaled dynamically, which has its own answer to their overflow."""
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
            return self._intervene(self.settings.nan, f"the loss is {loss}, the gradient norm {norm}")
        values = {"loss": loss, "gradient norm": norm}
        if self.settings.spike and math.isfinite(norm):
            for name, value in values.items():
                if why := self._spike(name, value):
                    return self._intervene(self.settings.on_spike, why)
        if math.isfinite(norm):
            self._believe(values)
        return None

    def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Go on where the lines of a metrics.jsonl stop, as if this guard had judged them."""
        self.tries, self.good = 0, 0
        for history in self.history.values():
            history.clear()
        for record in records:
            if record.get("event") in ("skip", "rollback"):
                self.tries, self.good = self.tries + 1, 0
            elif "loss" in record:
                self._believe({"loss": record["loss"], "gradient norm": record["grad_norm"]})

    def _believe(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.history[name].append(value)
        self.good += 1
        if self.good >= self.settings.window:
            self.tries = 0

    def _spike(self, name: str, value: float) -> str:
        history = self.history[name]
        if len(history) < min(ENOUGH, self.settings.window):
            return ""
        median = statistics.median(history)
        deviation = max(DEVIATION * statistics.median(abs(v - median) for v in history), 1e-3 * abs(median))
        over = (value - median) / deviation if deviation else 0.0
        if over <= self.settings.spike:
            return ""
        return f"the {name} is {value:.4g}, {over:.1f} robust deviations over the median {median:.4g} of {len(history)} steps"

    def _intervene(self, action: str, why: str) -> Verdict:
        self.tries, self.good = self.tries + 1, 0
        if action != "stop" and self.tries > self.settings.tries:
            return Verdict("stop", f"{why}; {self.settings.tries} interventions (guard.tries) have not helped")
        return Verdict(action, why)
