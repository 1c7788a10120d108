"""Do ranks still hold what they should? Memory and links flip bits, and a wrong weight looks like any other.

`compare` asks whether ranks that should hold equal values do. `Checksums` is for debugging: it also knows what every
slice was when it was last written, so that it can say whose copy has changed, and where.
"""

from __future__ import annotations

import socket
import zlib
from collections import Counter
from collections.abc import Iterable

import numpy as np

from mpshard.comm import collectives
from mpshard.device.base import Array, Kind
from mpshard.optim import Optimizer
from mpshard.recover.status import STOPPED, Ended
from mpshard.shard.sharded import Sharded
from mpshard.shard.unit import Unit


class Damaged(RuntimeError):
    """A slice or a gathered unit on this rank is not what its owner wrote."""


def checksum(sharded: Sharded, array: Array) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(sharded.device.to_host(array)).view(np.uint8).data)


def compare(sharded: Sharded, optim: Optimizer, position: int) -> None:
    """Compare counters, replicas, and every unit as each rank gathers it. Collective; sends each unit once.

    Raises Ended, on every rank, that names what differs on which rank.
    """
    found: dict[str, int] = {"step": sharded.steps, "optimizer step": optim.steps, "position in the data": position}
    for unit in sharded.units.values():
        if unit.layout.world == 1:  # replicated
            found |= {name: checksum(sharded, array) for name, array in _held(unit, optim)}

    def look(unit: Unit, full: Array) -> None:
        found[f"gathered {unit.name}"] = checksum(sharded, full)

    sharded.engine.visit(look)
    comm = sharded.mesh.comm
    values = np.array([list(found.values())], np.int64)
    everywhere = collectives.gather_all(comm, values[0])
    for name, column in zip(found, everywhere.T, strict=True):
        usual, count = Counter(column.tolist()).most_common(1)[0]
        odd = [rank for rank, value in enumerate(column.tolist()) if value != usual]
        if odd:
            host = comm.allgather(socket.gethostname())[odd[0]]
            tie = ", or the others do: there is no majority" if 2 * count == comm.size else ""
            raise Ended(STOPPED, f"after step {sharded.steps}: {name} on rank {', '.join(map(str, odd))} ({host}) differs from what "
                                 f"{count} of {comm.size} ranks hold{tie}; the weights cannot be trusted, go back to a checkpoint")


def _held(unit: Unit, optim: Optimizer) -> Iterable[tuple[str, Array]]:
    """What this rank keeps of a unit from step to step: weights, moments."""
    yield f"weights of {unit.name}", unit.shard
    if unit.learns:
        for segment in unit.segments:
            for kind, array in optim.state_tensors(unit, segment).items():
                yield f"{kind} of {segment.name}", array


class Checksums:
    """Remembers a checksum of everything this rank owns, and every owner's of what it gathers.

    `updated` after weights were changed on purpose, `verify` before they are again. Each gathered unit is looked at when
    it is given up, so what happens while it is in use is found too. Costs a pass over all of it in each case.
    """

    def __init__(self, sharded: Sharded, optim: Optimizer) -> None:
        self.sharded, self.optim = sharded, optim
        self.own: dict[str, int] = {}
        self.owners: dict[str, np.ndarray] = {}
        sharded.engine.audit(self.gathered)
        self.updated()

    def updated(self) -> None:
        """What slices hold now is right. Collective."""
        self.own = {name: checksum(self.sharded, array) for name, array in self._slices()}
        mesh = self.sharded.mesh
        for unit in self.sharded.units.values():
            mine = np.array([checksum(self.sharded, self._as_gathered(unit))], np.int64)
            self.owners[unit.name] = (mine if unit.layout.world == 1 else collectives.gather_all(mesh.slices, mine)[:, 0])

    def verify(self) -> None:
        """Raises Damaged if a slice of this rank is not what it was."""
        for name, array in self._slices():
            if checksum(self.sharded, array) != self.own[name]:
                raise Damaged(f"the {name} on rank {self.sharded.mesh.rank} ({socket.gethostname()}) are not what they were "
                              "after their update")

    def gathered(self, unit: Unit, full: Array) -> None:
        """Raises Damaged if a gathered unit is not what the owners of its slices wrote."""
        for number, part in enumerate(full.reshape(unit.layout.world, -1)):
            if checksum(self.sharded, part) != self.owners[unit.name][number]:
                mesh = self.sharded.mesh
                owner = f"the slice {number} that its owner wrote" if mesh.world > 1 else "what was written"
                raise Damaged(f"{unit.name} as rank {mesh.rank} ({socket.gethostname()}) holds it gathered is not {owner}")

    def _slices(self) -> Iterable[tuple[str, Array]]:
        for unit in self.sharded.units.values():
            yield from _held(unit, self.optim)
            if unit.store.local is not unit.shard:
                yield f"published weights of {unit.name}", unit.store.local

    def _as_gathered(self, unit: Unit) -> Array:
        """This rank's slice as it looks in a gathered unit: after its trip through the wire's format."""
        size = unit.wire.size(unit.layout.shard_size)
        place = self.sharded.mesh.replicas.rank if unit.replicas > 1 else 0
        words = unit.store.local[place * size:(place + 1) * size]
        if unit.travels_as_it_is:
            return words
        out = self.sharded.device.empty(unit.layout.shard_size, unit.computes_in, Kind.STAGING)
        unit.wire.decode(self.sharded.device, words, out, 1)
        return out
