"""Arrays that last from step to step, and where: in the device's memory, or in the host's, visiting the device for an update.

Note on order. All copies of a device run one after another on one stream, so a buffer may be filled again as soon as the
copy that empties it has been issued. What the arithmetic reads, and memory that it uses anew, waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from mpshard.device.base import Accelerator, Array, Device, Event, Kind

T = TypeVar("T")


class Lasting:
    """One flat array, zero at first.

    Parameters
    ----------
    away: keep it in pinned memory of the host; it counts as none of the device's. Without effect on a CPU, whose memory
        is the host's.
    """

    def __init__(self, device: Device, size: int, dtype: Any, kind: Kind, away: bool = False) -> None:
        self.device, self.away = device, away and size > 0 and not device.on_host
        self._visiting: Array | None = None
        self._stored: Event | None = None  # when the last copy back to the host has arrived
        if self.away:
            self._home: Array = cast(Accelerator, device).pinned(size * np.dtype(dtype).itemsize).view(dtype)
            self._home.fill(0)
        else:
            self._home = device.zeros(size, dtype, kind)

    @classmethod
    def of(cls, device: Device, array: Array) -> Lasting:
        """One whose memory somebody else has made, on the device."""
        made = cls.__new__(cls)
        made.device, made.away, made._home, made._visiting, made._stored = device, False, array, None, None
        return made

    @property
    def array(self) -> Array:
        """Of the device, where it is there now; else of the host, as NumPy has it, when the last copy has arrived."""
        if self._visiting is not None:
            return self._visiting
        if self._stored is not None:
            self._stored.synchronize()
            self._stored = None
        return self._home

    def write(self, where: slice, values: np.ndarray) -> None:
        """Set a range from host values of the array's type. Between visits."""
        self.array[where] = values if self.away else self.device.from_host(values)

    # -- what `visits` does ------------------------------------------------------------------
    def fetch(self, accelerator: Accelerator) -> tuple[Array, Event]:
        """Start the copy to the device, into memory that is new to it."""
        copy = accelerator.empty(self._home.size, self._home.dtype, Kind.STAGING)
        return copy, accelerator.upload(_bytes(self._home), copy, after=[accelerator.record()])

    def arrive(self, copy: Array | None) -> None:
        self._visiting = copy

    def store(self, accelerator: Accelerator, updated: Event) -> tuple[Array, Event]:
        """Start the copy back, of what was issued before `updated`."""
        copy, self._visiting = self._visiting, None
        self._stored = accelerator.download(copy, _bytes(self._home), after=[updated])
        return copy, self._stored


def visits(device: Device, items: Sequence[T], of: Callable[[T], Sequence[Lasting]]) -> Iterator[T]:
    """Each item in turn; while the caller has it the arrays `of` it are on the device, and what it does to them is kept.

    The copies of the next item's and of the last one's run meanwhile, so up to three items' arrays take memory (as
    staging) at a time. The host waits for nothing.
    """
    moving = [[array for array in of(item) if array.away] for item in items]
    if not any(moving):
        yield from items
        return
    accelerator = cast(Accelerator, device)
    coming: list[tuple[Array, Event]] = [array.fetch(accelerator) for array in moving[0]]
    leaving: list[list[tuple[Array, Event]]] = []
    for number, item in enumerate(items):
        here = coming
        if len(leaving) > 1:
            _wait_for(accelerator, leaving.pop(0))
        coming = [array.fetch(accelerator) for array in moving[number + 1]] if number + 1 < len(items) else []
        _wait_for(accelerator, here)
        for array, (copy, _) in zip(moving[number], here, strict=True):
            array.arrive(copy)
        here = []
        yield item
        updated = accelerator.record()
        leaving.append([array.store(accelerator, updated) for array in moving[number]])
    while leaving:
        _wait_for(accelerator, leaving.pop(0))


def _wait_for(accelerator: Accelerator, copies: Sequence[tuple[Array, Event]]) -> None:
    """Arithmetic issued from now on, which may use the arrays or their memory, runs behind the copies."""
    for _, event in copies:
        accelerator.wait(event)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)
