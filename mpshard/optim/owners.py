"""Whole matrices from slices and back: each matrix has one rank that works on it.

What a rank holds of each matrix is arithmetic (`Layout`), so every rank knows all counts and one exchange with nothing
but numbers serves each way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard.device.base import Array, Device, Kind
from mpshard.shard.layout import Layout

if TYPE_CHECKING:
    from mpi4py import MPI

Shape = tuple[int, int]


def owners(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank works on which matrix: the dearest first, each to the rank with the least so far. Pure.

    No rank gets more than 4/3 of the best possible share (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    load = [0] * ranks
    chosen = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        chosen[name] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[chosen[name]] += costs[name]
    return chosen


@dataclass(frozen=True)
class Route:
    """Where a matrix's elements are: pieces[r] is what rank r of the slices holds of it, [start, stop), maybe nothing."""

    name: str
    owner: int
    pieces: tuple[tuple[int, int], ...]


def routes(layouts: Mapping[str, Layout], chosen: Mapping[str, int], ranks: int) -> list[Route]:
    """A `Route` for every matrix chosen, in the order of the layouts. Pure."""
    found = []
    for layout in layouts.values():
        held = [{s.name: (s.start, s.stop) for s in layout.segments(rank)} for rank in range(ranks)]
        found += [Route(place.name, chosen[place.name], tuple(of_rank.get(place.name, (0, 0)) for of_rank in held))
                  for place in layout.placements if place.name in chosen]
    return found


class Owners:
    """Moves matrices between the slices and their owners.

    Parameters
    ----------
    comm: the ranks, numbered by the slice that they own. layouts: of the units. shapes, costs: of each matrix.
    replicated: every rank holds all of every matrix.
    """

    def __init__(self, comm: MPI.Comm, layouts: Mapping[str, Layout], shapes: Mapping[str, Shape], costs: Mapping[str, int],
                 device: Device, dtype: Any, replicated: bool) -> None:
        self.comm, self.shapes, self.device, self.dtype = comm, shapes, device, dtype
        self.whole = replicated or comm.size == 1  # there is nothing to collect
        self.chosen = owners(costs, comm.size)
        self.routes = [] if self.whole else routes(layouts, self.chosen, comm.size)
        self.mine = [name for name in shapes if self.chosen[name] == comm.rank]

    def collect(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        """{matrix: this rank's elements, flat} -> {matrix: (r, c)} of those that this rank owns. Collective.

        The results may share memory with `parts`.
        """
        if self.whole:
            return {name: parts[name].reshape(self.shapes[name]) for name in self.mine}
        sent = self._by_owner()
        received = self._exchange([parts[r.name] for of_owner in sent for r in of_owner if r.name in parts],
                                  [sum(_size(r.pieces[self.comm.rank]) for r in of_owner) for of_owner in sent],
                                  [sum(_size(r.pieces[rank]) for r in sent[self.comm.rank]) for rank in range(self.comm.size)])
        found, at = {name: self.device.empty(self.shapes[name], self.dtype, Kind.STAGING) for name in self.mine}, 0
        for rank in range(self.comm.size):
            for r in sent[self.comm.rank]:
                start, stop = r.pieces[rank]
                found[r.name].reshape(-1)[start:stop] = received[at:at + stop - start]
                at += stop - start
        return found

    def spread(self, matrices: Mapping[str, Array]) -> dict[str, Array]:
        """The way back: {matrix: (r, c)} of those that this rank owns -> {matrix: this rank's elements, flat}. Collective."""
        if self.whole:
            return self._to_all(matrices)
        sent = self._by_owner()
        received = self._exchange([matrices[r.name].reshape(-1)[slice(*r.pieces[rank])]
                                   for rank in range(self.comm.size) for r in sent[self.comm.rank]],
                                  [sum(_size(r.pieces[rank]) for r in sent[self.comm.rank]) for rank in range(self.comm.size)],
                                  [sum(_size(r.pieces[self.comm.rank]) for r in of_owner) for of_owner in sent])
        found, at = {}, 0
        for r in (r for of_owner in sent for r in of_owner):
            size = _size(r.pieces[self.comm.rank])
            if size:
                found[r.name] = received[at:at + size]
            at += size
        return found

    def _to_all(self, matrices: Mapping[str, Array]) -> dict[str, Array]:
        if self.comm.size == 1:
            return {name: matrix.reshape(-1) for name, matrix in matrices.items()}
        order = [[name for name in self.shapes if self.chosen[name] == rank] for rank in range(self.comm.size)]
        counts = [sum(_size_of(self.shapes[name]) for name in names) for names in order]
        send = self._joined([matrices[name].reshape(-1) for name in order[self.comm.rank]], counts[self.comm.rank])
        received = self.device.from_host(_collectives().all_gather_uneven(self.comm, send, counts), Kind.STAGING)
        found, at = {}, 0
        for name in (name for names in order for name in names):
            size = _size_of(self.shapes[name])
            found[name] = received[at:at + size]
            at += size
        return found

    def _by_owner(self) -> list[list[Route]]:
        found: list[list[Route]] = [[] for _ in range(self.comm.size)]
        for route in self.routes:
            found[route.owner].append(route)
        return found

    def _exchange(self, parts: list[Array], send_counts: list[int], recv_counts: list[int]) -> Array:
        """By way of the host, so that any MPI will do."""
        send = self._joined(parts, sum(send_counts))
        return self.device.from_host(_collectives().exchange(self.comm, send, send_counts, recv_counts), Kind.STAGING)

    def _joined(self, parts: list[Array], size: int) -> np.ndarray:
        joined, at = self.device.empty(size, self.dtype, Kind.STAGING), 0
        for part in parts:
            joined[at:at + part.size] = part
            at += part.size
        return self.device.to_host(joined)


def _collectives() -> ModuleType:
    """Imported when there is something to send: planning an optimizer, and importing it, needs no MPI."""
    from mpshard.comm import collectives

    return collectives


def _size(piece: tuple[int, int]) -> int:
    return piece[1] - piece[0]


def _size_of(shape: Shape) -> int:
    return shape[0] * shape[1]
