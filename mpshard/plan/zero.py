"""The ZeRO paper's own arithmetic: what weights, gradients and optimizer take on each rank."""

from __future__ import annotations

SHARDED = {  # of weights, gradients, optimizer
    "none": (False, False, False), "optim": (False, False, True), "grad_op": (False, True, True), "full": (True, True, True)}


def state_bytes(parameters: float, ranks: int, strategy: str, weight: int = 2, gradient: int = 2, optimizer: int = 12) -> float:
    """Bytes a rank holds for `parameters` at so many bytes each, of which what `strategy` shards falls as 1 / ranks.

    The defaults are mixed precision with Adam: 16-bit weights and gradients, and in float32 the masters and two moments.
    Rajbhandari et al. 2019 (arXiv:1910.02054), section 5 and figure 1. What a run of mpshard holds is `mpshard.plan.plan`'s
    business: there weights are gathered from the masters and gradients summed in float32.
    """
    return sum(size * parameters / (ranks if sharded else 1)
               for size, sharded in zip((weight, gradient, optimizer), SHARDED[strategy], strict=True))
