"""Tokens on disk as one long sequence.

A `Tokens` joins pieces (files of ids, text files read as bytes, small arrays) end to end without copying any. Files
are memory-mapped when first read, so ranks of a node share the page cache and none holds the corpus.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpshard.config import ConfigError

Array = npt.NDArray[np.integer[Any]]

# A mapping keeps a file descriptor, and a corpus may have more files than the usual limit of 1024.
_MAX_MAPPED = 128
# How far into each file ids are checked when it is opened; the rest is checked as it is read.
_CHECKED_AT_OPEN = 1 << 24


class Piece(NamedTuple):
    """A run of tokens: a name for errors, their type and number, and how to get at them, shape (length,)."""

    name: str
    dtype: np.dtype[Any]
    length: int
    open: Callable[[], Array]


def array_piece(name: str, array: Array) -> Piece:
    """Tokens already in memory."""
    return Piece(name, array.dtype, len(array), lambda: array)


def bin_piece(path: str, dtype: npt.DTypeLike) -> Piece:
    """A file of raw little-endian ids (``.bin``), or, as uint8, a file of text."""
    dtype = np.dtype(dtype).newbyteorder("<")
    with open(path, "rb") as file:  # so that it is known now whether it can be, and not at the first token
        size = file.seek(0, os.SEEK_END)
    if size % dtype.itemsize:
        raise ConfigError(f"{path} has {size} bytes, so it is not {dtype.name}; is data.token_dtype right?")
    return Piece(path, dtype, size // dtype.itemsize, lambda: np.memmap(path, dtype, "r"))


def npy_piece(path: str) -> Piece:
    """A one-dimensional integer array in NumPy's format (``.npy``)."""

    def open_() -> Array:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array

    try:
        array = open_()
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path} is not a .npy file of integers: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {array.dtype} of shape {array.shape}; token ids are integers of shape (n,)")
    return Piece(path, array.dtype, len(array), open_)


class Tokens:
    """Pieces end to end: ``len(tokens)``, ``tokens.read(starts, length)``.

    Parameters
    ----------
    pieces : joined in this order; empty ones are dropped.
    vocab_size : ids outside [0, vocab_size) are refused, naming file and place: at once in the first 2**24 of each
        piece, beyond that when they are read.
    """

    def __init__(self, pieces: Sequence[Piece], vocab_size: int) -> None:
        self._pieces = [piece for piece in pieces if piece.length]
        self._ends = np.cumsum([piece.length for piece in self._pieces], dtype=np.int64)
        self._mapped: OrderedDict[int, Array] = OrderedDict()
        self.vocab_size = vocab_size
        for i, piece in enumerate(self._pieces):
            if self._may_exceed(piece.dtype):
                self._check(self._array(i)[:_CHECKED_AT_OPEN], i, 0)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._pieces else 0

    def read(self, starts: Sequence[int] | npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Copies of ``tokens[start : start + length]`` for each start: int64, (len(starts), length)."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts, strict=True):
            self._read_into(row, int(start))
        return out

    def _read_into(self, row: npt.NDArray[np.int64], start: int) -> None:
        if start < 0 or start + len(row) > len(self):
            raise IndexError(f"tokens [{start}, {start + len(row)}) of {len(self)}")
        i = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(row):
            offset = start + filled - (int(self._ends[i]) - self._pieces[i].length)
            part = self._array(i)[offset : offset + len(row) - filled]
            if self._may_exceed(part.dtype):
                self._check(part, i, offset)
            row[filled : filled + len(part)] = part
            filled += len(part)
            i += 1

    def _array(self, i: int) -> Array:
        """Piece i's tokens, from the least recently used mappings or opened now."""
        array = self._mapped.pop(i, None)
        if array is None:
            array = np.asarray(self._pieces[i].open())
            if len(array) != self._pieces[i].length:
                raise ConfigError(f"{self._pieces[i].name} had {self._pieces[i].length} tokens, now {len(array)}")
            if len(self._mapped) >= _MAX_MAPPED:
                self._mapped.popitem(last=False)
        self._mapped[i] = array
        return array

    def _may_exceed(self, dtype: np.dtype[Any]) -> bool:
        """Whether the type can hold ids outside the vocabulary; bytes with a vocabulary of 256 cannot."""
        return dtype.kind == "i" or 256**dtype.itemsize > self.vocab_size

    def _check(self, part: Array, i: int, offset: int) -> None:
        """Refuse ids outside the vocabulary; `part` starts at token `offset` of piece i."""
        if part.min() < 0 or part.max() >= self.vocab_size:
            place = int(np.argmax((part < 0) | (part >= self.vocab_size)))
            raise ConfigError(
                f"{self._pieces[i].name} has id {part[place]} at token {offset + place}, outside the vocabulary of "
                f"{self.vocab_size}; is model.vocab_size or data.token_dtype right?"
            )
