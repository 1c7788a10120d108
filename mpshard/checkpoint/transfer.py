"""Pieces of tensors to a safetensors file and back: every rank its own byte ranges, all at once.

Bytes pass through one small buffer a rank. On the way they are converted to the file's type and their checksums
computed, so nothing is read or walked through twice.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpshard.checkpoint import dtypes, publish
from mpshard.checkpoint.extents import Batch, Extent, batches, cut, extent
from mpshard.checkpoint.safetensors_file import Tensor
from mpshard.comm.agree import agree
from mpshard.comm.files import SharedFile, in_rounds
from mpshard.device.base import Array, Device, Kind

if TYPE_CHECKING:
    from mpi4py import MPI

# Bytes of the buffer: more made neither writing nor reading faster. Of small models a small part, so that saving and
# loading add a few hundredths at most to what a rank holds anyway.
LARGEST, SMALLEST, PART = 4 << 20, 64 << 10, 32


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flattened tensor `name`, and where this rank keeps them (flat; None: nowhere)."""

    name: str
    start: int
    stop: int
    array: Array = None


class Sum(NamedTuple):
    """The CRC-32 of the bytes of elements [start, stop) of a tensor as stored."""

    name: str
    start: int
    stop: int
    crc: int


class Outgoing:
    """This rank's pieces on their way to a file.

    plan: the transfers. `bytes_of` one of them yields its bytes, converted to the file's types, in a buffer that the next
    call uses again. When all have been asked for in order, `sums` holds the pieces' checksums.
    """

    def __init__(self, tensors: Mapping[str, Tensor], pieces: Sequence[Piece], device: Device) -> None:
        extents = [extent(tensors[piece.name], piece.start, piece.stop) for piece in pieces]
        self.tensors, self.pieces, self.device = tensors, pieces, device
        self.plan = batches(extents, _chunk(extents))
        self.buffer = device.host_bytes(max([0, *(b.nbytes for b in self.plan)]))
        self.crcs = [0] * len(pieces)

    def bytes_of(self, batch: Batch) -> np.ndarray:
        for part in batch.parts:
            piece = self.pieces[part.index]
            tensor = self.tensors[piece.name]
            raw = self.buffer[part.at:part.at + (part.hi - part.lo) * tensor.itemsize]
            dtypes.encode(self.device.to_host(piece.array[part.lo:part.hi]), tensor.dtype, raw)
            self.crcs[part.index] = zlib.crc32(raw, self.crcs[part.index])
        return self.buffer[:batch.nbytes]

    @property
    def sums(self) -> list[Sum]:
        return [Sum(piece.name, piece.start, piece.stop, crc) for piece, crc in zip(self.pieces, self.crcs, strict=True)]


def write(comm: MPI.Comm, path: Path, header: bytes, tensors: Mapping[str, Tensor], pieces: Sequence[Piece],
          device: Device) -> list[Sum]:
    """Write a file from every rank's pieces and see it onto the disk; returns this rank's checksums. Collective.

    Raises ConfigError, on every rank, if the file cannot be written.
    """
    out = Outgoing(tensors, pieces, device)
    with SharedFile(comm, path, write=True) as file:

        def step(batch: Batch | bytes | None) -> None:
            if isinstance(batch, Batch):
                file.write_at_all(batch.offset, out.bytes_of(batch))
            else:
                file.write_at_all(0, np.frombuffer(batch or b"", np.uint8))

        mine = [header, *out.plan] if comm.rank == 0 else out.plan
        agree(comm, lambda: in_rounds(comm, mine, step))
    agree(comm, lambda: publish.sync(path))  # every node its own part
    return out.sums


def write_own(path: Path, header: bytes, tensors: Mapping[str, Tensor], pieces: Sequence[Piece], device: Device) -> list[Sum]:
    """Write this rank's part of a file without a word to the others: no MPI, so for a thread. Otherwise as `write`.

    header: empty on all ranks but one. Raises OSError.
    """
    out = Outgoing(tensors, pieces, device)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        _write_at(descriptor, 0, header)
        for batch in out.plan:
            _write_at(descriptor, batch.offset, out.bytes_of(batch).data)
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
    return out.sums


def _write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def read_own(path: Path, tensors: Mapping[str, Tensor], pieces: Sequence[Piece], device: Device) -> list[Sum]:
    """The checksums of pieces as they stand in the file; nothing is kept. No MPI. Raises OSError; a missing end counts as none."""
    extents = [extent(tensors[piece.name], piece.start, piece.stop) for piece in pieces]
    crcs, plan = [0] * len(pieces), batches(extents, _chunk(extents))
    buffer = device.host_bytes(max([0, *(b.nbytes for b in plan)]))
    with path.open("rb", buffering=0) as file:
        for batch in plan:
            file.seek(batch.offset)
            raw = buffer[:file.readinto(buffer[:batch.nbytes])]
            for part in batch.parts:
                size = (part.hi - part.lo) * extents[part.index].itemsize
                crcs[part.index] = zlib.crc32(raw[part.at:part.at + size], crcs[part.index])
    return [Sum(piece.name, piece.start, piece.stop, crc) for piece, crc in zip(pieces, crcs, strict=True)]


def read(comm: MPI.Comm, path: Path, tensors: Mapping[str, Tensor], pieces: Sequence[Piece], device: Device,
         ends: Mapping[str, Sequence[int]] | None = None) -> list[Sum]:
    """Fill every rank's pieces from a file, converted to the type of their arrays; returns checksums. Collective.

    Only the bytes of this rank's pieces are read.

    Parameters
    ----------
    ends: for each tensor, the sorted element numbers at which its checksummed ranges end: pieces are cut there, so that
        each checksum returned belongs to one range.

    Raises ConfigError, on every rank, if the file cannot be read.
    """
    cuts = list(_cuts(pieces, tensors, ends or {}))
    extents = [e for _, e in cuts]
    sums = [0] * len(cuts)
    with SharedFile(comm, path) as file:
        plan = batches(extents, _chunk(extents))
        buffer = device.host_bytes(max([0, *(b.nbytes for b in plan)]))

        def step(batch: Batch | None) -> None:
            if batch is None:
                return file.read_at_all(0, buffer[:0])
            file.read_at_all(batch.offset, buffer[:batch.nbytes])
            for part in batch.parts:
                piece, e = cuts[part.index]
                raw = buffer[part.at:part.at + (part.hi - part.lo) * e.itemsize]
                sums[part.index] = zlib.crc32(raw, sums[part.index])
                if piece.array is not None:
                    at = e.start - piece.start + part.lo
                    target = piece.array[at:at + part.hi - part.lo]
                    values = dtypes.decode(raw, tensors[e.name].dtype).astype(target.dtype, copy=False)
                    target[:] = values if isinstance(target, np.ndarray) else device.from_host(values, Kind.STAGING)

        agree(comm, lambda: in_rounds(comm, plan, step))
    return [Sum(e.name, e.start, e.stop, crc) for e, crc in zip(extents, sums, strict=True)]


def _chunk(extents: Iterable[Extent]) -> int:
    return max(SMALLEST, min(LARGEST, sum(e.nbytes for e in extents) // PART))


def _cuts(pieces: Sequence[Piece], tensors: Mapping[str, Tensor],
          ends: Mapping[str, Sequence[int]]) -> Iterator[tuple[Piece, Extent]]:
    for piece in pieces:
        for part in cut(extent(tensors[piece.name], piece.start, piece.stop), ends.get(piece.name, ())):
            yield piece, part
