"""What all optimizers share: the verdict on a step, clipping, decay by parameter, moments, the average, checkpoints.

Nothing here communicates but the publication of new weights: the one global number that is needed, the gradient norm,
comes with the step's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mpshard.autograd.tensor import Parameter
from mpshard.config import ConfigError
from mpshard.device.base import Array
from mpshard.device.lasting import Lasting, visits
from mpshard.optim.ema import Average
from mpshard.optim.moments import FORMATS, Moments, Run
from mpshard.optim.schedules import clip_factor
from mpshard.shard.layout import Segment

if TYPE_CHECKING:
    from mpshard.shard.sharded import Sharded, StepOutput
    from mpshard.shard.unit import Unit


def decays(parameter: Parameter, no_decay: Sequence[str] | None = None) -> bool:
    """Whether weight decay applies: by default to all but scalars and 1-D parameters (norms, biases); with patterns
    (shell style, on the parameter's name), to all that match none of them."""
    if no_decay is None:
        return len(parameter.shape) >= 2
    return not any(fnmatchcase(parameter.name, pattern) for pattern in no_decay)


class Optimizer:
    """An update of this rank's slices. Subclasses say which moments they keep (`kinds`) and how a run is updated.

    Parameters
    ----------
    lr: learning rate; may be changed between steps. weight_decay: decoupled: weights shrink by lr * weight_decay a step
        (Loshchilov, Hutter 2017, arXiv:1711.05101), decided per parameter and applied per segment of the slice.
    clip_grad_norm: largest global gradient norm, 0 for none. no_decay: name patterns, see `decays`.
    moments: "fp32" (the masters' precision), or "bf16", rounded at random. ema: decay of a running average, 0 for none.

    Attributes
    ----------
    steps: updates made. moments: {unit: Moments}. average: the running average, None without.
    """

    name = ""
    kinds: tuple[str, ...] = ()

    def __init__(self, sharded: Sharded, lr: float, weight_decay: float, clip_grad_norm: float, no_decay: Sequence[str] | None,
                 moments: str, ema: float) -> None:
        if moments not in FORMATS:
            raise ConfigError(f"optim.moments={moments!r} is not known; use {', '.join(FORMATS)}")
        self.sharded, self.lr, self.weight_decay, self.clip_grad_norm, self.steps = sharded, lr, weight_decay, clip_grad_norm, 0
        self.short = moments == "bf16"
        self.decayed = {p.name: decays(p, no_decay) for p in sharded.model.parameters}
        self.moments = {name: self._moments(unit, self.kinds, [s for s in unit.segments if self.is_elementwise(s.name)])
                        for name, unit in sharded.units.items() if unit.learns}
        self.average = Average(sharded, ema) if ema else None

    def is_elementwise(self, name: str) -> bool:
        """Whether `update` treats this parameter; if not the subclass does."""
        return True

    def _moments(self, unit: Unit, kinds: Sequence[str], segments: Sequence[Segment]) -> Moments:
        if self.short and unit.dtype.itemsize != 4:
            raise ConfigError("optim.moments=bf16 needs masters in fp32")
        return Moments(self.sharded.device, segments, self.decayed, kinds, unit.dtype, self.short, self.sharded.seed,
                       self.sharded.options.offloads_optimizer)

    def step(self, output: StepOutput | None = None) -> float:
        """Update every slice with the gradients that `Sharded.step` left. Collective. Returns the clipping factor, 0 for a
        step that was skipped.

        output: what `Sharded.step` returned; by default the latest.
        The gradients are of the sum of token losses; 1 / (valid tokens of the step) enters here, as one factor.
        A gradient that is not finite (the verdict is global) changes nothing but the loss scale, where there is one;
        without one it raises FloatingPointError on every rank.
        """
        output = output or self.sharded.last
        if output is None:
            raise ValueError("there is no gradient to step with: call Sharded.step first")
        scaler = self.sharded.loss_scale
        if scaler is not None:
            scaler.update(output.is_finite)
        if not output.is_finite:
            if scaler is None:
                raise FloatingPointError(f"the gradient norm is {output.grad_norm} (loss {output.loss}); weights are unchanged")
            return 0.0
        self.steps += 1
        clip = clip_factor(output.grad_norm, self.clip_grad_norm)
        self.update_all(clip / output.tokens / output.loss_scale)
        return clip

    def update_all(self, scale: float) -> None:
        """Update all slices that learn with their gradients times `scale`, and publish them. Collective."""
        under_way = []
        for unit in visits(self.sharded.device, [self.sharded.units[name] for name in self.moments], self.lasting):
            self.update_unit(unit, scale)
            if self.average is not None:
                self.average.update(unit, self.steps)
            under_way.append(unit.publish())
        for pending in under_way:
            if pending is not None:
                pending.wait()

    def lasting(self, unit: Unit) -> list[Lasting]:
        """What an update of a unit reads and writes, but for the gradient."""
        average = [] if self.average is None else [self.average.lasting[unit.name]]
        return [unit.master, *self.moments[unit.name].lasting.values(), *average]

    def update_unit(self, unit: Unit, scale: float) -> None:
        """Update this rank's slice of a unit."""
        for run, arrays in self.moments[unit.name].visit(self.steps):
            self.update(unit.shard[run.where], unit.gradient[run.where], arrays, run, scale)

    def update(self, weight: Array, gradient: Array, moments: Sequence[Array], run: Run, scale: float) -> None:
        """Update one run, flat arrays of one size, in place; `gradient` is left as it is."""
        raise NotImplementedError

    def decay_of(self, run: Run) -> float:
        return self.weight_decay if run.decay else 0.0

    # -- checkpoints -------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """The counters, for `load_state`: numbers that are the same on every rank."""
        scaler = self.sharded.loss_scale
        return {"name": self.name, "steps": self.steps} | ({"loss_scale": scaler.state()} if scaler is not None else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from counters that `state` returned."""
        self.steps = int(state["steps"])
        if self.sharded.loss_scale is not None and "loss_scale" in state:
            self.sharded.loss_scale.load_state(state["loss_scale"])

    def state_tensors(self, unit: Unit, segment: Segment) -> dict[str, Array]:
        """What else a checkpoint must hold of a segment (or a part of one) of the unit's slice, by kind: flat arrays of its
        size, saved as `kind.parameter`. Kinds may differ from parameter to parameter."""
        found = self.moments[unit.name].of(segment)
        if self.average is not None:
            found["ema"] = self.average.lasting[unit.name].array[segment.slice]
        return found
