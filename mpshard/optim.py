"""AdamW on slices, learning-rate schedules and clipping. Nothing here communicates: the one global number it needs,
the gradient norm, comes with the step's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mpshard.autograd.tensor import Parameter
from mpshard.device.base import Array, Kind

if TYPE_CHECKING:
    from mpshard.shard.sharded import Sharded, StepOutput
    from mpshard.shard.unit import Unit


def decays(parameter: Parameter, no_decay: Sequence[str] | None = None) -> bool:
    """Whether weight decay applies: by default to all but scalars and 1-D parameters (norms, biases); with patterns
    (shell style, on the parameter's name), to all that match none of them."""
    if no_decay is None:
        return len(parameter.shape) >= 2
    return not any(fnmatchcase(parameter.name, pattern) for pattern in no_decay)


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


class AdamW:
    """Adam with decoupled weight decay on this rank's slices; masters and moments in the shards' precision.

    Loshchilov, Hutter 2017 (arXiv:1711.05101). Decay is decided per parameter and applied per segment of the slice.

    Parameters
    ----------
    lr: learning rate; may be changed between steps. betas, eps, weight_decay: as torch.optim.AdamW.
    clip_grad_norm: largest global gradient norm, 0 for none. no_decay: name patterns, see `decays`.
    """

    def __init__(self, sharded: Sharded, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 weight_decay: float = 0.1, clip_grad_norm: float = 1.0, no_decay: Sequence[str] | None = None) -> None:
        self.sharded, self.lr, self.betas, self.eps = sharded, lr, betas, eps
        self.weight_decay, self.clip_grad_norm, self.steps = weight_decay, clip_grad_norm, 0
        decayed = {p.name: decays(p, no_decay) for p in sharded.model.parameters}
        self.moments: dict[str, tuple[Array, Array]] = {}
        self.runs: dict[str, list[tuple[slice, bool]]] = {}
        for name, unit in sharded.units.items():
            if not unit.learns:
                continue
            first, second = (sharded.device.zeros(unit.shard.size, unit.dtype, Kind.MOMENT) for _ in range(2))
            self.moments[name] = first, second
            self.runs[name] = _runs([(s.offset, s.offset + s.size, decayed[s.name]) for s in unit.segments])

    def step(self, output: StepOutput) -> float:
        """Update every slice with the gradients that `Sharded.step` left. Collective. Returns the clipping factor, 0 for a
        step that was skipped.

        The gradients are of the sum of token losses; 1 / (valid tokens of the step) enters here, as one factor.
        A gradient that is not finite (the verdict is global) changes nothing but the loss scale, where there is one;
        without one it raises FloatingPointError on every rank.
        """
        scaler = self.sharded.loss_scale
        if scaler is not None:
            scaler.update(output.is_finite)
        if not output.is_finite:
            if scaler is None:
                raise FloatingPointError(f"the gradient norm is {output.grad_norm} (loss {output.loss}); weights are unchanged")
            return 0.0
        self.steps += 1
        clip = clip_factor(output.grad_norm, self.clip_grad_norm)
        for name, (first, second) in self.moments.items():
            unit = self.sharded.units[name]
            for run, decay in self.runs[name]:
                self.sharded.device.adamw(
                    unit.shard[run], unit.gradient[run], first[run], second[run], lr=self.lr, beta1=self.betas[0],
                    beta2=self.betas[1], eps=self.eps, weight_decay=self.weight_decay if decay else 0.0,
                    step=self.steps, gradient_scale=clip / output.tokens / output.loss_scale)
        self.sharded.publish()
        return clip

    # -- checkpoints -------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """The counters, for `load_state`: numbers that are the same on every rank."""
        scaler = self.sharded.loss_scale
        return {"steps": self.steps} | ({"loss_scale": scaler.state()} if scaler is not None else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from counters that `state` returned."""
        self.steps = int(state["steps"])
        if self.sharded.loss_scale is not None and "loss_scale" in state:
            self.sharded.loss_scale.load_state(state["loss_scale"])

    def state_tensors(self, unit: Unit) -> dict[str, Array]:
        """What else a checkpoint must hold, by kind: arrays laid out as the unit's slice, saved as `kind.parameter`."""
        first, second = self.moments[unit.name]
        return {"exp_avg": first, "exp_avg_sq": second}


def _runs(segments: Sequence[tuple[int, int, bool]]) -> list[tuple[slice, bool]]:
    """Join neighbouring segments that are treated alike: a slice of a unit becomes a handful of flat updates."""
    runs: list[tuple[int, int, bool]] = []
    for start, stop, decay in segments:
        if runs and runs[-1][1] == start and runs[-1][2] == decay:
            runs[-1] = (runs[-1][0], stop, decay)
        else:
            runs.append((start, stop, decay))
    return [(slice(start, stop), decay) for start, stop, decay in runs]
