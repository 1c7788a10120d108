"""From pieces of tensors to byte ranges of a file, and from those to bounded transfers. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpshard.checkpoint.safetensors_file import Tensor


@dataclass(frozen=True)
class Extent:
    """Elements [start, stop) of a flattened tensor; they lie from byte `offset` of the file on."""

    name: str
    start: int
    stop: int
    offset: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.itemsize


def extent(tensor: Tensor, start: int, stop: int) -> Extent:
    """Elements [start, stop) of a tensor of a file."""
    return Extent(tensor.name, start, stop, tensor.start + start * tensor.itemsize, tensor.itemsize)


def cut(whole: Extent, ends: Sequence[int]) -> Iterator[Extent]:
    """An extent cut at those of the sorted element numbers `ends` that lie inside it."""
    start = whole.start
    for end in [*ends[bisect_right(ends, start):], whole.stop]:
        stop = min(end, whole.stop)
        if start < stop:
            yield Extent(whole.name, start, stop, whole.offset + (start - whole.start) * whole.itemsize, whole.itemsize)
            start = stop


@dataclass(frozen=True)
class Part:
    """Elements [lo, hi) of extent number `index`, counted from the extent's start, at byte `at` of a batch."""

    index: int
    lo: int
    hi: int
    at: int


@dataclass(frozen=True)
class Batch:
    """`nbytes` bytes of a file from `offset` on: what one call transfers."""

    offset: int
    nbytes: int
    parts: tuple[Part, ...]


def batches(extents: Iterable[Extent], limit: int) -> list[Batch]:
    """Transfers of at most `limit` bytes (at least 8) that cover the extents in order, neighbours in the file together."""
    found: list[Batch] = []
    parts: list[Part] = []
    begin = end = 0  # of the batch that is being filled, in bytes of the file

    def close() -> None:
        if parts:
            found.append(Batch(begin, end - begin, tuple(parts)))
            parts.clear()

    for number, e in enumerate(extents):
        lo = 0
        while lo < e.stop - e.start:
            offset = e.offset + lo * e.itemsize
            room = (limit - (end - begin)) // e.itemsize
            if not parts or offset != end or room == 0:
                close()
                begin = end = offset
                room = limit // e.itemsize
            hi = min(lo + room, e.stop - e.start)
            parts.append(Part(number, lo, hi, end - begin))
            end += (hi - lo) * e.itemsize
            lo = hi
    close()
    return found
