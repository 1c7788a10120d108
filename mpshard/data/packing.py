"""Documents of different lengths packed into rows of one length, so that little is computed on padding.

A row holds whole documents; each is a segment of its own whose positions begin at 0, and attention does not look
across. Which documents share a row depends on their lengths and order alone, so every rank packs alike.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mpshard.config import ConfigError
from mpshard.data.batches import Batch, deal, deal_evaluation
from mpshard.data.records import Document


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of document numbers whose lengths (each at most `room`) add up to at most `room`.

    Best fit, longest first: a document goes where it leaves least room; at most 11/9 of the fewest rows possible
    (Johnson 1973, "Near-optimal bin packing algorithms").
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(free, (lengths[number], -1))
        if at < len(free):
            left, row = free.pop(at)
            rows[row].append(number)
        else:
            left, row = room, len(rows)
            rows.append([number])
        insort(free, (left - lengths[number], row))
    return rows


class PackedBatches:
    """As `Batches`, of documents: a sample is a row of them. Each document's first token is no target.

    Parameters
    ----------
    documents : those without anything to learn are left out, long ones cut after ``seq_len + 1`` tokens.
    vocab_size : ids must be below it. The others as of `Batches`.

    Raises
    ------
    ConfigError : no document has anything to learn, or one has ids outside the vocabulary.
    """

    def __init__(self, documents: Iterable[Document], seq_len: int, vocab_size: int, seed: int | None = 0, ignore_index: int = -100,
                 name: str = "the data") -> None:
        self.seq_len, self.seed, self.ignore_index, self.name = seq_len, seed, ignore_index, name
        self._documents: list[Document] = []
        cut = empty = 0
        for document in documents:
            ids, learn = document.ids[:seq_len + 1], document.learn[:seq_len + 1]
            cut += len(ids) < len(document.ids)
            if len(ids) and ids.max() >= vocab_size:
                raise ConfigError(f"{name} has id {ids.max()}, outside the vocabulary of {vocab_size}; is model.vocab_size right?")
            if learn[1:].any():
                self._documents.append(Document(ids, learn))
            else:
                empty += 1
        if not self._documents:
            cutting = f" cut to data.seq_len={seq_len}; raise it" if cut else ""
            raise ConfigError(f"{name} has nothing to learn in {empty} documents{cutting}")
        lengths = [len(document.ids) - 1 for document in self._documents]  # positions that have a target
        self._rows = pack(lengths, seq_len)
        self.n_samples = len(self._rows)
        used = sum(lengths) / (self.n_samples * seq_len)
        self.about = (f"{name}: {len(lengths):,} documents in {self.n_samples:,} rows of {seq_len}, {used:.0%} full"
                      + (f"; {cut:,} cut to fit" if cut else "") + (f"; {empty:,} left out, nothing to learn in them" if empty else ""))

    def step_batch(self, position: int, global_batch_size: int, micro_batch_size: int, rank: int, world: int) -> Batch:
        """See `Batches.step_batch`."""
        ids = deal(position, self.n_samples, self.seed, global_batch_size, micro_batch_size, rank, world)
        return self._batch(ids)

    def eval_batches(self, rank: int, world: int, micro_batch_size: int, limit: int = 0) -> Iterator[Batch]:
        """See `Batches.eval_batches`."""
        for first in deal_evaluation(self.n_samples, micro_batch_size, rank, world, limit):
            yield self._batch(np.arange(first, first + micro_batch_size)[None])

    def _batch(self, ids: npt.NDArray[np.int64]) -> Batch:
        """Rows of numbers `ids` (micro-batches, b); numbers past the end are rows of padding."""
        shape = (*ids.shape, self.seq_len)
        inputs, positions = np.zeros((2, *shape), np.int64)
        targets, segments = np.full(shape, self.ignore_index, np.int64), np.zeros(shape, np.int32)
        for where in np.ndindex(ids.shape):
            end = number = 0
            for number, index in enumerate(self._rows[ids[where]] if ids[where] < self.n_samples else [], 1):
                tokens, learn = self._documents[index]
                place = slice(end, end + len(tokens) - 1)
                inputs[where][place], segments[where][place] = tokens[:-1], number - 1
                targets[where][place][learn[1:]] = tokens[1:][learn[1:]]
                positions[where][place] = np.arange(len(tokens) - 1)
                end = place.stop
            segments[where][end:] = number  # padding sees padding
            positions[where][end:] = np.arange(self.seq_len - end)
        return Batch(inputs, targets, segments, positions)
