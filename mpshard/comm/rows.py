"""A table of embeddings travels by the rows that are wanted: a micro-batch of tokens names few of them.

Each rank tells the owner of every slice which of the rows that lie there whole it wants, one bit a row, and gets these and what
else is in the slice (rows that two slices share, other parameters, padding). Gradients go back the same way: a row that no token
named has none. What is not wanted stays in the full buffer as it was, and nobody reads it.

Note on order. What a message holds depends on the bits, so an operation has two stages, and the second stage's calls must come in
one order on all ranks: they have a communicator and a lane of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpshard.comm import collectives
from mpshard.comm.collectives import Operation, Pending
from mpshard.comm.transport import MessageTransport, Slot, Store
from mpshard.device.base import Array, Kind


@dataclass
class Wanted:
    """Rows by number, counted from the first that lies whole in their owner's slice.

    mine[r]: those of rank r's slice that this rank wants. theirs[r]: those of this rank's slice that rank r wants, known once
    rank r has told.
    """

    mine: list[np.ndarray]
    theirs: list[np.ndarray]


class RowMessages:
    """Moves a unit with one table between slices and full buffers, as `MessageTransport` does, on the CPU.

    wholes[r]: rows of the table that lie whole in rank r's slice; places[r]: where in the slice. width: elements of a row.
    """

    def __init__(self, carrier: MessageTransport, wholes: Sequence[range], places: Sequence[slice], width: int) -> None:
        self.carrier, self.wholes, self.places, self.width = carrier, wholes, places, width
        self.comm, self.device, self.progress = carrier.comm.Dup(), carrier.device, carrier.progress
        self.mask_bytes = max(-(-len(rows) // 8) for rows in wholes)
        self.asked: dict[int, Wanted] = {}  # by micro-batch

    def begin(self) -> None:
        """A new step: what the last one's micro-batches wanted is of no use."""
        self.asked.clear()

    def gather(self, store: Store, slot: Slot, ids: Mapping[int, Array]) -> Pending:
        """Start collecting the rows that {micro-batch: ids} name and all that is no row; as `Transport.gather`."""
        full = slot.array[: store.local.size * self.comm.size]
        wanted = Wanted(self._by_owner(ids.values()), [])
        self.asked.update(dict.fromkeys(ids, wanted))
        self.carrier.bytes_gathered += (self.comm.size - 1) * self.mask_bytes + self._from_others(store.local.size, wanted) * full.itemsize
        return self.progress.start(Pending(self._gather(store.local, full, wanted), full), lane="rows")

    def knows(self, micro_batches: Iterable[int]) -> bool:
        """Whether all these have been gathered for, so that their gradients can go back."""
        return all(mb in self.asked for mb in micro_batches)

    def reduce(self, slot: Slot, size: int, out: Array, accumulate: bool, travels_as: Any, micro_batches: Sequence[int]) -> Pending:
        """Start summing the gradient of these micro-batches, in rank order; as `Transport.reduce`."""
        full, several = slot.array[:size], [self.asked[mb] for mb in micro_batches]
        wanted = several[0] if len(several) == 1 else Wanted(*(
            [np.unique(np.concatenate(rows)) for rows in zip(*parts, strict=True)]
            for parts in ([w.mine for w in several], [w.theirs for w in several])))
        self.carrier.bytes_reduced += self._from_others(out.size, wanted) * np.dtype(travels_as).itemsize
        sizes = [self._words(out.size, self.comm.rank, rows) for rows in wanted.theirs]
        came = self.device.empty(sum(sizes), travels_as, Kind.STAGING)
        parts = np.split(came, np.cumsum(sizes)[:-1])
        return self.progress.start(Pending(self._scatter(full, wanted, parts, came), out,
                                           then=lambda: self._sum(parts, wanted, out, accumulate)), lane="rows")

    # -- the operations ----------------------------------------------------------------------
    def _gather(self, own: Array, full: Array, wanted: Wanted) -> Operation:
        yield from self._tell(wanted)
        rank, slices = self.comm.rank, full.reshape(self.comm.size, -1)
        going = [self._words(own.size, rank, rows) for rows in wanted.theirs]
        coming = [self._words(own.size, r, rows) for r, rows in enumerate(wanted.mine)]
        sent, came = (self.device.empty(sum(sizes), own.dtype, Kind.STAGING) for sizes in (going, coming))
        for part, rows in zip(np.split(sent, np.cumsum(going)[:-1]), wanted.theirs, strict=True):
            self._pack(own, rank, rows, part)
        yield from collectives.all_to_all_uneven(self.comm, sent, going, came, coming)
        for r, part in enumerate(np.split(came, np.cumsum(coming)[:-1])):
            self._unpack(part, r, wanted.mine[r], slices[r])

    def _tell(self, wanted: Wanted) -> Operation:
        """Which rows this rank wants, to their owners; and what the others want of it, into `wanted`."""
        told = np.zeros((self.comm.size, 8 * self.mask_bytes), bool)
        for mask, rows in zip(told, wanted.mine, strict=True):
            mask[rows] = True
        heard = np.empty((self.comm.size, self.mask_bytes), np.uint8)
        yield from collectives.all_to_all(self.comm, np.packbits(told, axis=1).ravel(), heard.ravel())
        wanted.theirs = [np.flatnonzero(mask) for mask in np.unpackbits(heard, axis=1)]

    def _scatter(self, full: Array, wanted: Wanted, parts: list[Array], came: Array) -> Operation:
        slices = full.reshape(self.comm.size, -1)
        going = [self._words(slices.shape[1], r, rows) for r, rows in enumerate(wanted.mine)]
        packed = self.device.empty(sum(going), full.dtype, Kind.STAGING)
        for r, part in enumerate(np.split(packed, np.cumsum(going)[:-1])):
            self._pack(slices[r], r, wanted.mine[r], part)
        sent = packed
        if came.dtype != full.dtype:
            sent = self.device.empty(packed.size, came.dtype, Kind.STAGING)
            self.device.cast(packed, sent)
        yield from collectives.all_to_all_uneven(self.comm, sent, going, came, [part.size for part in parts])

    def _sum(self, parts: list[Array], wanted: Wanted, out: Array, accumulate: bool) -> None:
        total = self.device.empty(out.size, out.dtype, Kind.STAGING) if accumulate else out
        total[:] = 0
        place = self.places[self.comm.rank]
        table = total[place].reshape(-1, self.width)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is looked for in the sum
            for part, rows in zip(parts, wanted.theirs, strict=True):
                before, after, values = self._split(part, place, out.size)
                total[:place.start] += before
                total[place.stop:] += after
                table[rows] += values
        if accumulate:
            self.device.add(out, total)

    # -- what a message holds: the slice before its whole rows, after them, then the rows wanted ----------
    def _words(self, slice_size: int, owner: int, rows: np.ndarray) -> int:
        place = self.places[owner]
        return slice_size - (place.stop - place.start) + len(rows) * self.width

    def _split(self, words: Array, place: slice, slice_size: int) -> tuple[Array, Array, Array]:
        rest = slice_size - (place.stop - place.start)
        return words[:place.start], words[place.start:rest], words[rest:].reshape(-1, self.width)

    def _pack(self, part: Array, owner: int, rows: np.ndarray, words: Array) -> None:
        place = self.places[owner]
        before, after, values = self._split(words, place, part.size)
        before[:], after[:] = part[:place.start], part[place.stop:]
        np.take(part[place].reshape(-1, self.width), rows, axis=0, out=values, mode="clip")

    def _unpack(self, words: Array, owner: int, rows: np.ndarray, part: Array) -> None:
        place = self.places[owner]
        before, after, values = self._split(words, place, part.size)
        part[:place.start], part[place.stop:] = before, after
        part[place].reshape(-1, self.width)[rows] = values

    def _by_owner(self, ids: Iterable[Array]) -> list[np.ndarray]:
        named = np.unique(np.concatenate([np.ravel(array) for array in ids]))
        edges = [np.searchsorted(named, (rows.start, rows.stop)) for rows in self.wholes]
        return [named[first:last] - rows.start for (first, last), rows in zip(edges, self.wholes, strict=True)]

    def _from_others(self, slice_size: int, wanted: Wanted) -> int:
        """Elements that come for a gather, and go for a reduce, over the network."""
        return sum(self._words(slice_size, r, rows) for r, rows in enumerate(wanted.mine) if r != self.comm.rank)
