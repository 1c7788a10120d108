"""Where every element of a unit lives: sizes and ranks in, offsets out. Pure arithmetic, no MPI, no arrays.

A unit's parameters are concatenated into one flat vector, which is padded to a multiple of world * align
elements; rank r owns the r-th of `world` equal slices. So a gather lands in place and every parameter of the
full unit is a view. The segment table says which piece of which parameter a slice holds: weight decay,
checkpoints, optimizer groups and resharding work per parameter although storage is flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGN = 16  # elements: a cache line of float32, so that no two ranks' slices share one


@dataclass(frozen=True)
class Placement:
    """One parameter's place in the flat vector, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a flattened parameter, found at `offset` of one rank's slice. Never empty."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The segment's place in the slice."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class Layout:
    """The flat vector of one unit, cut for `world` ranks."""

    placements: tuple[Placement, ...]
    world: int
    align: int = ALIGN

    @property
    def size(self) -> int:
        """Elements that are parameters, padding not counted."""
        return self.placements[-1].end if self.placements else 0

    @property
    def shard_size(self) -> int:
        """Elements of each rank's slice, padding included; the same on every rank."""
        return -(-self.size // (self.world * self.align)) * self.align

    @property
    def padded_size(self) -> int:
        return self.shard_size * self.world

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """What rank `rank` owns, in order. Padding and zero-size parameters appear in no segment."""
        first, last = rank * self.shard_size, (rank + 1) * self.shard_size
        found = []
        for p in self.placements:
            lo, hi = max(first, p.offset), min(last, p.end)
            if lo < hi:
                found.append(Segment(p.name, lo - p.offset, hi - p.offset, lo - first))
        return tuple(found)

    def table(self, name: str, slices: int) -> Table:
        """The matrix of this name, in a vector that is gathered in so many equal slices, a divisor of `world`."""
        place = next(p for p in self.placements if p.name == name)
        rows, width = place.shape
        return Table(place.offset, rows, width, self.padded_size // slices)


@dataclass(frozen=True)
class Table:
    """A matrix inside a flat vector, and which of its rows lie whole in one of the vector's slices.

    begin: its first element's place in the vector. rows, width: its shape. slice_size: elements of each slice.
    """

    begin: int
    rows: int
    width: int
    slice_size: int

    def whole(self, rank: int) -> range:
        """The rows that lie whole in the slice of rank `rank`."""
        start = rank * self.slice_size - self.begin
        first = min(self.rows, max(0, -(-start // self.width)))
        last = min(self.rows, (start + self.slice_size) // self.width)
        return range(first, max(first, last))

    def place(self, rank: int) -> slice:
        """Where those rows lie in that slice; all else there is no row of the table, or parts of one."""
        rows = self.whole(rank)
        if not rows:
            return slice(0, 0)
        start = self.begin - rank * self.slice_size
        return slice(start + rows.start * self.width, start + rows.stop * self.width)


def joined(segments: Sequence[Segment]) -> list[slice]:
    """The places in the slice that segments cover, neighbours as one."""
    places: list[slice] = []
    for s in segments:
        if places and places[-1].stop == s.offset:
            places[-1] = slice(places[-1].start, s.offset + s.size)
        else:
            places.append(s.slice)
    return places


def lay_out(parameters: Sequence[tuple[str, tuple[int, ...]]], world: int, align: int = ALIGN) -> Layout:
    """Place (name, shape) pairs one after another. Names must differ; world >= 1."""
    if world < 1 or align < 1:
        raise ValueError(f"a layout needs at least one rank and alignment 1, not world={world}, align={align}")
    placements, offset = [], 0
    for name, shape in parameters:
        placements.append(Placement(name, tuple(shape), offset))
        offset += prod(shape)
    if len({p.name for p in placements}) != len(placements):
        raise ValueError(f"a unit holds two parameters of one name: {sorted(p.name for p in placements)}")
    return Layout(tuple(placements), world, align)
