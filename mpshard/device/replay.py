"""Passes through a block that are made again without Python between their kernels.

A pass through a small block is some thirty kernels of some ten microseconds each, and Python needs a good part of that from one
to the next. But the kernels and their order are the same every time, only memory lies elsewhere. So the calls of one pass are
written down, each pointer as a distance from one of a few places (the weights, the input, the memory of the pass's own arrays),
and made again by one call into the library. What CUDA graphs do for a GPU.

Note on what would go wrong. Work that is not a compiled kernel (NumPy's, a copy by assignment) is not seen and would be missing.
So whoever uses a recording first makes it once from memory full of NaN and compares every bit: `mpshard.shard.replays`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard.device.c_library import SIGNATURES, at, load
from mpshard.device.pool import ALIGNMENT

if TYPE_CHECKING:
    from mpshard.device.compiled import CompiledDevice

WORDS = 15  # arguments of a kernel, at most: compiled.c's
AS_IT_IS, ACCUMULATE, KEPT, SCRATCH, PANELS, GIVEN = -1, 0, 1, 2, 3, 4  # places; those of the user begin at GIVEN


class _Word(ctypes.Union):
    _fields_ = [("integer", ctypes.c_long), ("real", ctypes.c_float), ("pointer", ctypes.c_void_p)]


class _Call(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("words", _Word * WORDS), ("places", ctypes.c_byte * WORDS)]


@dataclass
class _Array:
    """An array that the pass allocated: where, of how many bytes, and from which call to which."""

    start: int
    nbytes: int
    lease: weakref.ref[np.ndarray]
    born: int
    died: int = -1  # not yet
    place: int = SCRATCH
    offset: int = 0


@dataclass
class Recording:
    """The calls of a pass. kept_bytes, scratch_bytes: of memory for its own arrays, those that outlive it and the others."""

    calls: Any
    kept_bytes: int
    scratch_bytes: int
    device: CompiledDevice
    panels: int  # bytes of the products' scratch memory

    def run(self, kept: np.ndarray, scratch: np.ndarray, given: Sequence[np.ndarray | None], accumulate: bool = False) -> None:
        """Make the calls. given: the arrays that the recorder was given, where they are now. accumulate: add to gradients."""
        assert self.device.panels.nbytes >= self.panels
        places = _places(GIVEN + len(given))(None, at(kept), at(scratch), at(self.device.panels), *map(at, given))
        _replay()(len(self.calls), self.calls, places, accumulate)


@dataclass
class Recorder:
    """Writes down the kernels that a device runs between `start` and `stop`, and what they work on.

    refused: why the pass cannot be made again, "" as long as nothing stands in the way.
    """

    device: CompiledDevice
    refused: str = ""
    arrays: list[_Array] = field(default_factory=list)
    written: list[tuple[int, list[Any]]] = field(default_factory=list)  # function, [(letter, value, where)]

    def start(self, given: Sequence[np.ndarray | None], gradients: Sequence[np.ndarray] = (), lasting: Sequence[np.ndarray] = (),
              earlier: Recorder | None = None) -> None:
        """given: arrays that the pass works on and does not allocate, None for one that is not there this time; `Recording.run`
        wants them in this order. gradients: those of them that are added to or overwritten. lasting: such as stay where and
        as they are. earlier: who recorded the forward pass whose arrays this one reads."""
        self.thread = threading.get_ident()
        self.regions = [(at(a) or 0, a.nbytes, GIVEN + number, 0) for number, a in enumerate(given) if a is not None]
        self.regions += [(a.start, a.nbytes, a.place, a.offset) for a in (earlier.arrays if earlier else ()) if a.place != SCRATCH]
        self.lasting = [(at(array) or 0, array.nbytes) for array in lasting]
        self.targets = {GIVEN + number for number, a in enumerate(given) if any(a is one for one in gradients)}
        self.device.written_by, self.allocate = self, self.device.empty
        self.device.empty = self.empty

    def end(self) -> None:
        """Write down nothing more. What is alive of the pass's arrays may still be dropped until `stop`."""
        self.device.empty, self.device.written_by = self.allocate, None

    def stop(self, outputs: Sequence[tuple[Any, int]] = ()) -> Recording:
        """outputs: arrays of the pass that live on by themselves, and the number among the given ones that each is to have."""
        kept = 0
        for array in self.arrays:
            if array.lease() is None:
                continue
            number = next((number for output, number in outputs if at(output) == array.start and output.nbytes == array.nbytes), None)
            array.place, array.offset = (KEPT, kept) if number is None else (GIVEN + number, 0)
            kept += 0 if number is not None else _aligned(array.nbytes)
        scratch = _share([array for array in self.arrays if array.place == SCRATCH])
        return Recording(self._calls(), kept, scratch, self.device, self.device.panels.nbytes)

    def kept_alike(self, kept: np.ndarray) -> bool:
        """Whether memory that a replay has filled holds, bit for bit, what the recorded pass has kept and still has."""
        pairs = [(kept[a.offset:a.offset + a.nbytes], a.lease()) for a in self.arrays if a.place == KEPT]
        return all(there is not None and np.array_equal(here, there) for here, there in pairs)

    # -- what the device tells ---------------------------------------------------------------
    def empty(self, *args: Any, **more: Any) -> np.ndarray:
        """As the device's, and written down."""
        array = self.allocate(*args, **more)
        if array.nbytes and threading.get_ident() == self.thread:
            number = len(self.arrays)
            lease: Any = array.base
            self.arrays.append(_Array(at(array) or 0, array.nbytes, weakref.ref(lease, lambda _: self._died(number)), len(self.written)))
        return array

    def _died(self, number: int) -> None:
        self.arrays[number].died = len(self.written)

    def called(self, name: str, chosen: str, args: Sequence[Any]) -> None:
        """A kernel is about to run."""
        if threading.get_ident() != self.thread:  # progress, beside the pass
            return
        again = getattr(load(), f"again_{name}_{chosen}", None)
        if again is None:
            self.refused = self.refused or f"{name} is not made again"
            return
        # Of arrays where they are, not themselves: a reference would keep them alive.
        self.written.append((ctypes.cast(again, ctypes.c_void_p).value or 0,
                             [(letter, None, self._where(value)) if letter == "p" and value is not None else (letter, value, None)
                              for letter, value in zip(SIGNATURES[name], args, strict=True)]))

    def _where(self, array: np.ndarray | int) -> tuple[_Array | None, int, int]:
        """The array of the pass's own that a pointer points into, else None and a place; and the distance from its start."""
        if isinstance(array, int):  # a function's
            return None, AS_IT_IS, array
        address = at(array) or 0
        for own in reversed(self.arrays):
            if own.died < 0 and own.start <= address < own.start + own.nbytes:
                return own, SCRATCH, address - own.start
        panels = self.device.panels
        for start, nbytes, place, offset in [*self.regions, (at(panels) or 0, panels.nbytes, PANELS, 0)]:
            if start <= address < start + nbytes:
                return None, place, offset + address - start
        if not any(start <= address < start + nbytes for start, nbytes in self.lasting):
            self.refused = self.refused or f"an array of shape {array.shape} comes from elsewhere"
        return None, AS_IT_IS, address

    def _calls(self) -> Any:
        calls = (_Call * len(self.written))()
        for call, (function, words) in zip(calls, self.written, strict=True):
            call.function = function
            into = {where[1] for _, _, where in words if where is not None and where[0] is None}
            for number in range(WORDS):
                call.places[number] = AS_IT_IS
            for number, (letter, value, where) in enumerate(words):
                if where is not None:
                    own, place, offset = where
                    call.places[number], call.words[number].integer = (place, offset) if own is None else (own.place, own.offset + offset)
                elif letter == "f":
                    call.words[number].real = value
                elif letter == "a" and into & self.targets:
                    call.places[number] = ACCUMULATE
                elif letter != "p":
                    call.words[number].integer = int(value)
        return calls


@cache
def _places(count: int) -> Any:
    return ctypes.c_void_p * count


@cache
def _replay() -> Any:
    library = load()
    assert not isinstance(library, str)
    library.replay.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    library.replay.restype = None
    return library.replay


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _share(arrays: Sequence[_Array]) -> int:
    """Give each an offset such that no two alive at once overlap, each as far down as it can be; the bytes needed in all."""
    total = 0
    placed: list[_Array] = []
    for array in arrays:  # in the order in which they were born
        offset = 0
        for other in sorted((o for o in placed if o.died > array.born), key=lambda o: o.offset):
            if other.offset - offset >= _aligned(array.nbytes):
                break
            offset = max(offset, other.offset + _aligned(other.nbytes))
        array.offset = offset
        placed.append(array)
        total = max(total, offset + _aligned(array.nbytes))
    return total
