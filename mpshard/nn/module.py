"""What a model is made of: modules in execution order, each with its parameters and a forward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpshard.autograd.tensor import Array, Parameter, Tape, Tensor


@dataclass
class MicroBatch:
    """What a forward pass reads beside activations; device arrays.

    ids (b, t) int64; targets (b, t) int64 or None (then the head yields logits); segments (b, t) int32 or None:
    the packed document of each position; positions (b, t) int64 or None (0 ... t-1).
    """

    ids: Array
    targets: Array | None = None
    segments: Array | None = None
    positions: Array | None = None
    ignore_index: int = -100


class Module:
    """A step of the model: reads one activation, makes the next. By default each is one unit of sharding.

    Attributes
    ----------
    name: as in programs, traces and errors ("embed", "layers.3", "head").
    parameters: those it stores, in storage order; fused ones must follow each other.
    fused: views over neighbouring parameters that its forward uses in their place.
    borrowed: parameters it reads but another module stores (tied embeddings).
    backward_reads_weights: False lets the schedule leave out the gather before its backward.
    """

    name: str
    parameters: list[Parameter]
    fused: Sequence[Parameter] = ()
    borrowed: Sequence[Parameter] = ()
    backward_reads_weights = True

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """x (b, t, d), None for the first module -> the next module's input; the last yields a loss or logits."""
        raise NotImplementedError


class Model:
    """Modules in execution order and what is needed to write the model down again. Shapes only, no memory."""

    def __init__(self, modules: list[Module], config: Any) -> None:
        self.modules, self.config = modules, config

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters]

    @property
    def size(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.size for parameter in self.parameters)
