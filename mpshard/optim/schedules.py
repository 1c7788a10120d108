"""What a step's update is multiplied with: the learning rate's schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients with so that their norm is at most `limit` (0: no clipping); torch's formula."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, schedule: str = "cosine", floor: float = 0.0) -> float:
    """Rate of step `step` (from 0): linear warm-up to `peak` over `warmup` steps, then down to floor * peak at `steps`.

    schedule: "cosine" (Loshchilov, Hutter 2016, arXiv:1608.03983, eq. 5), "linear" or "constant".
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    shapes: dict[str, Callable[[], float]] = {
        "cosine": lambda: 0.5 * (1 + math.cos(math.pi * done)), "linear": lambda: 1 - done, "constant": lambda: 1.0}
    if schedule not in shapes:
        raise ValueError(f"schedule={schedule!r} is not known; use one of {', '.join(shapes)}")
    return peak * (floor + (1 - floor) * shapes[schedule]()) if schedule != "constant" else peak
