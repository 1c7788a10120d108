"""Gradient descent with momentum on slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpshard.device.base import Array
from mpshard.optim.base import Optimizer
from mpshard.optim.moments import Run

if TYPE_CHECKING:
    from mpshard.shard.sharded import Sharded


class SGD(Optimizer):
    """velocity = momentum * velocity + gradient; weights -= lr * velocity. Weight decay is decoupled, as in AdamW.

    Polyak 1964, in torch.optim.SGD's form (momentum without dampening); torch's weight_decay, an L2 term in the gradient,
    is another thing. momentum 0 keeps no moments at all. The other parameters: see `Optimizer`.
    """

    name = "sgd"

    def __init__(self, sharded: Sharded, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0,
                 clip_grad_norm: float = 1.0, no_decay: Sequence[str] | None = None, moments: str = "fp32", ema: float = 0.0) -> None:
        self.momentum, self.kinds = momentum, ("momentum_buffer",) if momentum else ()
        super().__init__(sharded, lr, weight_decay, clip_grad_norm, no_decay, moments, ema)

    def update(self, weight: Array, gradient: Array, moments: Sequence[Array], run: Run, scale: float) -> None:
        device, keep = self.sharded.device, 1 - self.lr * self.decay_of(run)
        if not moments:
            device.blend(weight, gradient, keep, -self.lr * scale)
            return
        velocity, = moments
        device.blend(velocity, gradient, self.momentum, scale)
        device.blend(weight, velocity, keep, -self.lr)
