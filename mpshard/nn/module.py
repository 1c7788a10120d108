"""What a model is made of: modules in execution order, each with its parameters and a forward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpshard.autograd.tensor import Array, Parameter, Tape, Tensor
from mpshard.config import LoraConfig


class Cache:
    """Keys and values of the positions that a model has seen, per block, so that the next ones need not make them again.

    capacity: positions it has room for. length: positions seen so far, the same for all blocks and sequences.
    arrays: {module: (b, capacity, 2 k e)}, the turned keys and the values side by side; made at first use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.arrays: dict[str, Array] = {}


@dataclass
class MicroBatch:
    """What a forward pass reads beside activations; device arrays.

    ids (b, t) int64; targets (b, t) int64 or None (then the head yields logits); segments (b, t) int32 or None:
    the packed document of each position; positions (b, t) int64 or None (0 ... t-1). last_only: logits of the last
    position alone. cache: the positions before these; with it goes no backward.
    """

    ids: Array
    targets: Array | None = None
    segments: Array | None = None
    positions: Array | None = None
    ignore_index: int = -100
    last_only: bool = False
    cache: Cache | None = None

    def memory_of(self, module: str) -> tuple[Cache, str] | None:
        """Where a module's attention finds and leaves keys and values, if it is to."""
        return None if self.cache is None else (self.cache, module)


class Module:
    """A step of the model: reads one activation, makes the next. By default each is one unit of sharding.

    Attributes
    ----------
    name: as in programs, traces and errors ("embed", "layers.3", "head").
    parameters: those it stores, in storage order; fused ones must follow each other.
    fused: views over neighbouring parameters that its forward uses in their place.
    borrowed: parameters it reads but another module stores (tied embeddings).
    looked_up: a table (v, d) of which forward reads the rows that the micro-batch's ids name, and no others.
    backward_reads_weights: False lets the schedule leave out the gather before its backward.
    replayable: forward is the same operations in the same order for every micro-batch of one shape, whatever its numbers are,
        and does nothing else: then small passes are made again from a recording (see `mpshard.shard.replays`).
    lasting: arrays that it made once and reads since.
    """

    name: str
    parameters: list[Parameter]
    fused: Sequence[Parameter] = ()
    borrowed: Sequence[Parameter] = ()
    looked_up: Parameter | None = None
    backward_reads_weights = True
    replayable = False
    lasting: Sequence[Array] = ()

    def forward(self, tape: Tape, x: Any, batch: MicroBatch) -> Tensor:
        """x: a Tensor (b, t, d), None for the first module -> the next module's input; the last yields a loss or logits."""
        raise NotImplementedError


class Model:
    """Modules in execution order and what is needed to write the model down again. Shapes only, no memory."""

    def __init__(self, modules: list[Module], config: Any) -> None:
        self.modules, self.config = modules, config
        self.lora: LoraConfig | None = None  # what `mpshard.nn.lora` has added

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters]

    @property
    def size(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """{name: shape} of the blocks' 2-D parameters that learn: not the embedding's or the head's."""
        return {p.name: (p.shape[0], p.shape[1]) for module in self.modules[1:-1] for p in module.parameters
                if len(p.shape) == 2 and p.size and p.trainable}
