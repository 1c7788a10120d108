"""Batches: a pure function of (seed, position), the same tokens whatever the number of ranks.

A sample is a window of ``seq_len + 1`` tokens; the inputs are all but the last, the targets all but the first. Windows
start ``seq_len`` apart, so they overlap by one token and every token but the corpus's first is a target once. Training
leaves out the ragged end of the corpus; evaluation pads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpshard.config import ConfigError
from mpshard.data.sampler import sample_ids
from mpshard.data.tokens import Tokens


class Batch(NamedTuple):
    """Micro-batches of one rank: int64 (micro-batches, micro_batch_size, seq_len).

    segments, positions: None, or of packed documents which one each token belongs to (int32) and its place therein.
    """

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32] | None = None
    positions: npt.NDArray[np.int64] | None = None

    def first(self) -> Batch:
        """The first micro-batch alone, (micro_batch_size, seq_len)."""
        segments, positions = (None if part is None else part[0] for part in self[2:])
        return Batch(self.inputs[0], self.targets[0], segments, positions)


def deal(
    position: int, n_samples: int, seed: int | None, global_batch_size: int, micro_batch_size: int, rank: int, world: int
) -> npt.NDArray[np.int64]:
    """Which samples a rank computes in the step that starts at sample `position` of the endless stream of epochs.

    The step is cut into global micro-batches of `micro_batch_size` samples; number g = m * world + rank is this
    rank's micro-batch m. Which samples a global micro-batch holds does not depend on `world`. seed: None for no shuffling.

    Returns
    -------
    int64 (micro-batches, micro_batch_size). Raises ValueError unless they come out even.
    """
    if global_batch_size % (micro_batch_size * world):
        raise ValueError(f"{global_batch_size} samples do not fill micro-batches of {micro_batch_size} x {world}")
    g = np.arange(rank, global_batch_size // micro_batch_size, world)  # (micro-batches,)
    positions = position + g[:, None] * micro_batch_size + np.arange(micro_batch_size)
    return positions % n_samples if seed is None else sample_ids(positions, n_samples, seed)


def deal_evaluation(n_samples: int, micro_batch_size: int, rank: int, world: int, limit: int = 0) -> Iterator[int]:
    """The first sample of each of a rank's micro-batches of an evaluation; past the end: one of padding alone.

    All ranks get equally many. `limit` > 0 takes that many of the micro-batches over all ranks, evenly spread.
    """
    total = -(-n_samples // micro_batch_size)
    chosen = np.arange(min(limit, total)) * total // min(limit, total) if limit else np.arange(total)
    for first in range(0, len(chosen), world):
        g = chosen[first + rank] if first + rank < len(chosen) else total
        yield int(g) * micro_batch_size


class Batches:
    """Windows of a token sequence, dealt to ranks.

    Parameters
    ----------
    tokens : the corpus; at least 2 tokens.
    seq_len : tokens of a sample.
    seed : of the order of training samples; None: as they lie.
    ignore_index : target of positions that do not count in the loss.
    name : of the corpus, for errors.
    """

    about = ""  # what a user should know of how it was made

    def __init__(
        self, tokens: Tokens, seq_len: int, seed: int | None = 0, ignore_index: int = -100, name: str = "the data"
    ) -> None:
        if len(tokens) < 2:
            raise ConfigError(f"{name} has {len(tokens)} tokens; there is nothing to predict")
        self.tokens, self.seq_len, self.seed, self.ignore_index, self.name = tokens, seq_len, seed, ignore_index, name
        self.n_samples = (len(tokens) - 1) // seq_len
        self.n_eval_windows = -(-(len(tokens) - 1) // seq_len)

    def step_batch(
        self, position: int, global_batch_size: int, micro_batch_size: int, rank: int, world: int
    ) -> Batch:
        """This rank's part of the step that starts at sample `position` of the endless stream of epochs: see `deal`.

        Raises
        ------
        ConfigError : a corpus shorter than one sample.
        ValueError : `global_batch_size` is no multiple of ``micro_batch_size * world``.
        """
        if self.n_samples == 0:
            raise ConfigError(
                f"{self.name} has {len(self.tokens)} tokens, under data.seq_len + 1 = {self.seq_len + 1}; lower seq_len"
            )
        ids = deal(position, self.n_samples, self.seed, global_batch_size, micro_batch_size, rank, world)
        windows = self.tokens.read(ids.ravel() * self.seq_len, self.seq_len + 1).reshape(*ids.shape, -1)
        return Batch(windows[..., :-1].copy(), windows[..., 1:].copy())

    def eval_batches(self, rank: int, world: int, micro_batch_size: int, limit: int = 0) -> Iterator[Batch]:
        """Every window once over all ranks, as batches of one micro-batch: (1, micro_batch_size, seq_len).

        All ranks yield equally many. The end of the last window, and whole rows where windows do not fill the last
        micro-batches, have `ignore_index` as targets (and 0 as inputs), so the sum of losses over all ranks divided by
        the number of valid targets is the corpus's exact mean, with any `world` and `micro_batch_size`.

        `limit` > 0 takes that many of the micro-batches over all ranks, evenly spread over the corpus.
        """
        for first in deal_evaluation(self.n_eval_windows, micro_batch_size, rank, world, limit):
            yield self._eval_batch(first, micro_batch_size)

    def _eval_batch(self, first_window: int, micro_batch_size: int) -> Batch:
        inputs = np.zeros((1, micro_batch_size, self.seq_len), np.int64)
        targets = np.full_like(inputs, self.ignore_index)
        for row in range(micro_batch_size):
            start = (first_window + row) * self.seq_len
            length = min(self.seq_len, len(self.tokens) - 1 - start)
            if length > 0:
                window = self.tokens.read([start], length + 1)[0]
                inputs[0, row, :length], targets[0, row, :length] = window[:-1], window[1:]
        return Batch(inputs, targets)
