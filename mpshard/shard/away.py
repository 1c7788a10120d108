"""What forward keeps for backward, in the host's memory meanwhile: `Offload`, `Release`, `Fetch` of a program.

Copies run beside the arithmetic, and the host waits for none of them. Pinned buffers are kept: from the second step on
nothing is allocated for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpshard.autograd.tensor import Tensor
from mpshard.device.base import Accelerator, Array, Event

SMALLEST = 64 << 10  # bytes: what is smaller stays where it is
Key = tuple[str, int]  # stage, micro-batch


@dataclass
class _Moved:
    """An array, the tensors that hold it, and its copy on the host. array: None while it is on the host alone."""

    tensors: list[Tensor]
    host: np.ndarray
    shape: tuple[int, ...]
    dtype: Any
    array: Array | None
    event: Event  # of its last copy


class Away:
    """Moves tensors' arrays to the host and back."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.moved: dict[Key, list[_Moved]] = {}
        self.buffers: dict[int, list[np.ndarray]] = defaultdict(list)  # not in use, by bytes
        self.bytes_moved = 0

    def begin(self) -> None:
        """A new run of a program: what an unfinished one has left is forgotten."""
        self.moved.clear()

    def offload(self, key: Key, tensors: Iterable[Tensor]) -> None:
        """Start copying arrays of at least SMALLEST bytes to the host."""
        holders: dict[int, tuple[Array, list[Tensor]]] = {}
        for tensor in tensors:
            if (array := tensor.holds) is not None and array.nbytes >= SMALLEST:
                holders.setdefault(id(array), (array, []))[1].append(tensor)
        written, moved = [self.device.record()], []
        for array, of_array in holders.values():
            host = self._buffer(array.nbytes)
            moved.append(_Moved(of_array, host, array.shape, array.dtype, array, self.device.download(array, host, written)))
            self.bytes_moved += array.nbytes
        self.moved[key] = moved

    def release(self, key: Key) -> None:
        """Let the device's copies go. Arithmetic issued from now on, which may use their memory, waits for the copies."""
        for entry in self.moved[key]:
            self.device.wait(entry.event)
            entry.array = None
            for tensor in entry.tensors:
                tensor.data = None

    def fetch(self, key: Key) -> None:
        """Start copying back, into memory that is new to it."""
        for entry in self.moved[key]:
            entry.array = self.device.empty(entry.shape, entry.dtype)
            entry.event = self.device.upload(entry.host, entry.array, [self.device.record()])

    def arrive(self, key: Key) -> None:
        """Arithmetic issued from now on finds the tensors as they were. Their buffers may be filled again: a later copy
        runs behind this one."""
        for entry in self.moved.pop(key, ()):
            self.device.wait(entry.event)
            for tensor in entry.tensors:
                tensor.data = entry.array
            self.buffers[entry.host.nbytes].append(entry.host)

    def _buffer(self, nbytes: int) -> np.ndarray:
        return self.buffers[nbytes].pop() if self.buffers[nbytes] else self.device.pinned(nbytes)
