"""Optimizers on slices, learning-rate schedules, clipping, the running average of the weights.

    optim = AdamW(sharded, lr=3e-4)         SGD, Muon
    output = sharded.step(batch)
    optim.step(output)
    with optim.average.in_place(): ...      evaluate the average (ema=0.999)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpshard.optim.adamw import AdamW
from mpshard.optim.base import Optimizer, decays
from mpshard.optim.ema import Average
from mpshard.optim.muon import Muon
from mpshard.optim.schedules import clip_factor, learning_rate
from mpshard.optim.sgd import SGD

if TYPE_CHECKING:
    from mpshard.config import OptimConfig
    from mpshard.shard.sharded import Sharded

__all__ = ["SGD", "AdamW", "Average", "Muon", "Optimizer", "clip_factor", "decays", "from_config", "learning_rate"]


def from_config(config: OptimConfig, sharded: Sharded) -> Optimizer:
    """The optimizer of an ``[optim]`` section."""
    c = config
    shared: dict[str, Any] = {"lr": c.lr, "weight_decay": c.weight_decay, "clip_grad_norm": c.clip_grad_norm,
                              "no_decay": c.no_decay or None, "moments": c.moments, "ema": c.ema}
    if c.name == "sgd":
        return SGD(sharded, momentum=c.momentum, **shared)
    shared |= {"betas": c.betas, "eps": c.eps}
    if c.name == "muon":
        return Muon(sharded, momentum=c.momentum, lr_factor=c.muon_lr_factor, scale=c.muon_scale, **shared)
    return AdamW(sharded, **shared)
