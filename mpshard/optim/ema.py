"""A running average of the weights, sharded as they are: often a better model than the last step's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpshard.config import ConfigError
from mpshard.device.base import Array, Kind
from mpshard.device.lasting import Lasting, visits

if TYPE_CHECKING:
    from mpshard.shard.sharded import Sharded
    from mpshard.shard.unit import Unit

BLOCK = 1 << 20  # elements exchanged at a time


class Average:
    """average = decay * average + (1 - decay) * weights after every update; the first update's weights to begin with.

    As torch.optim.swa_utils.AveragedModel with get_ema_avg_fn(decay). Of what learns only: frozen weights are their own
    average. One more slice of the weights a rank.
    """

    def __init__(self, sharded: Sharded, decay: float) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"optim.ema={decay} must be above 0 and below 1")
        self.sharded, self.decay = sharded, decay
        self.lasting = {name: Lasting(sharded.device, unit.shard.size, unit.dtype, Kind.MOMENT, sharded.options.offloads_optimizer)
                        for name, unit in sharded.units.items() if unit.learns}

    @property
    def slices(self) -> Mapping[str, Array]:
        """{unit: (m,)}, this rank's slice of the average."""
        return {name: lasting.array for name, lasting in self.lasting.items()}

    def update(self, unit: Unit, step: int) -> None:
        """Take in a unit's weights after step `step`, counted from 1."""
        keep = self.decay if step > 1 else 0.0
        self.sharded.device.blend(self.lasting[unit.name].array, unit.shard, keep, 1 - keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the average inside, with its weights again afterwards. Collective; not for training."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        learning = [self.sharded.units[name] for name in self.lasting]
        for unit in visits(self.sharded.device, learning, lambda unit: (unit.master, self.lasting[unit.name])):
            weights, average = unit.shard, self.lasting[unit.name].array
            for start in range(0, average.size, BLOCK):
                block = slice(start, min(start + BLOCK, average.size))
                kept = self.sharded.device.empty(block.stop - start, average.dtype, Kind.STAGING)
                kept[...] = weights[block]
                weights[block] = average[block]
                average[block] = kept
        self.sharded.publish()
