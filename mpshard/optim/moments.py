"""An optimizer's memory of past gradients, on this rank's slice: in the masters' precision, or in 16 bits.

Note on 16 bits. A moment changes by a small part of itself a step, less than bfloat16 resolves (2^-8), so rounding to the
nearest would leave it where it is. Rounded at random (`Device.round_at_random`) it is right on average. The random
numbers are a function of (seed, parameter, kind, step, element) alone: the cut over the ranks makes no difference, and a
resumed run goes on with the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpshard.device.base import Array, Device, Kind
from mpshard.device.lasting import Lasting
from mpshard.shard.layout import Segment

BLOCK = 1 << 16  # elements treated at a time; divides 2^32, so that an element's number in a block has one upper half
BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("fp32", "bf16")


class Run(NamedTuple):
    """Elements that are treated alike: their place in the unit's slice, in the moments, and whether they decay."""

    where: slice
    state: slice
    decay: bool


class Moments:
    """Moments of some segments of one unit's slice: an array a kind, the segments end to end, nothing for the others.

    Parameters
    ----------
    segments: of this rank's slice, in order. decayed: {parameter: whether weight decay applies}.
    kinds: names, as a checkpoint has them. dtype: of the masters, in which the arithmetic is done.
    short: keep bfloat16, rounded at random. seed: of that. away: in the host's memory, see `Lasting`.
    """

    def __init__(self, device: Device, segments: Sequence[Segment], decayed: dict[str, bool], kinds: Sequence[str], dtype: Any,
                 short: bool = False, seed: int = 0, away: bool = False) -> None:
        self.device, self.dtype, self.short, self.seed = device, dtype, short, seed
        self.segments, self.starts, size = list(segments), {}, 0
        for s in segments:
            self.starts[s.name] = size - s.start  # of the parameter's element 0, were it here
            size += s.size
        self.runs = _runs([Run(s.slice, self._place(s), decayed[s.name]) for s in segments])
        self.decayed = decayed
        self.lasting = {kind: Lasting(device, size, BF16 if short else dtype, Kind.MOMENT, away) for kind in kinds}

    def of(self, segment: Segment) -> dict[str, Array]:
        """The moments of a segment, or of a part of one, by kind; none if it is not among these."""
        if segment.name not in self.starts:
            return {}
        return {kind: lasting.array[self._place(segment)] for kind, lasting in self.lasting.items()}

    def visit(self, step: int) -> Iterator[tuple[Run, list[Array]]]:
        """Runs with their moments, one after another; what the caller writes into these is kept. `step` counts from 1."""
        if not self.short:
            for run in self.runs:
                yield run, [lasting.array[run.state] for lasting in self.lasting.values()]
            return
        scratch = self.device.empty((len(self.lasting), BLOCK), self.dtype, Kind.STAGING)
        for s in self.segments:
            keys = [_key(self.seed, s.name, kind, step) for kind in self.lasting]
            for start in range(s.start // BLOCK * BLOCK, s.stop, BLOCK):
                block = Segment(s.name, max(s.start, start), min(s.stop, start + BLOCK), s.offset + max(s.start, start) - s.start)
                kept, wide = list(self.of(block).values()), [row[: block.size] for row in scratch]
                for short, values in zip(kept, wide, strict=True):
                    self.device.cast(short, values)
                yield Run(block.slice, self._place(block), self.decayed[s.name]), wide
                for key, values, short in zip(keys, wide, kept, strict=True):
                    self.device.round_at_random(values, short, key, block.start)

    def _place(self, s: Segment) -> slice:
        first = self.starts[s.name] + s.start
        return slice(first, first + s.size)


def _runs(runs: Sequence[Run]) -> list[Run]:
    """Join neighbouring segments that are treated alike: a slice of a unit becomes a handful of flat updates."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.where.stop == run.where.start and last.state.stop == run.state.start and last.decay == run.decay:
            joined[-1] = Run(slice(last.where.start, run.where.stop), slice(last.state.start, run.state.stop), run.decay)
        else:
            joined.append(run)
    return joined


def _key(seed: int, name: str, kind: str, step: int) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{name}/{kind}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
