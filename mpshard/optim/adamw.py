"""AdamW on slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpshard.device.base import Array
from mpshard.optim.base import Optimizer
from mpshard.optim.moments import Run

if TYPE_CHECKING:
    from mpshard.shard.sharded import Sharded


class AdamW(Optimizer):
    """Adam with decoupled weight decay: Loshchilov, Hutter 2017 (arXiv:1711.05101), algorithm 2.

    betas, eps, weight_decay: as torch.optim.AdamW. The other parameters: see `Optimizer`.
    """

    name = "adamw"
    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(self, sharded: Sharded, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 weight_decay: float = 0.1, clip_grad_norm: float = 1.0, no_decay: Sequence[str] | None = None,
                 moments: str = "fp32", ema: float = 0.0) -> None:
        super().__init__(sharded, lr, weight_decay, clip_grad_norm, no_decay, moments, ema)
        self.betas, self.eps = betas, eps

    def update(self, weight: Array, gradient: Array, moments: Sequence[Array], run: Run, scale: float) -> None:
        self.sharded.device.adamw(
            weight, gradient, *moments, lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], eps=self.eps,
            weight_decay=self.decay_of(run), step=self.steps, gradient_scale=scale)
