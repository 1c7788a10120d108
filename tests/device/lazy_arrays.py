"""Streams, events, memory and arrays of the stand-in for CuPy: see `lazy_cupy.py`."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

Range = tuple[int, int, bool]  # addresses from, to; whether written


def at(address: int, nbytes: int) -> np.ndarray:
    """The bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)


# -- streams and events ----------------------------------------------------------------------
@dataclass
class _Work:
    number: int  # in the order of issue, over all streams
    name: str
    ranges: list[Range]
    run: Callable[[], None]


class _Clock:
    """All streams, and the number of the last work issued."""

    def __init__(self) -> None:
        self.issued = 0
        self.streams: list[Stream] = []
        self.current: Stream | None = None


CLOCK = _Clock()


def overlap(a: list[Range], b: list[Range]) -> bool:
    return any((x[2] or y[2]) and x[0] < y[1] and y[0] < x[1] for x in a for y in b)


class Stream:
    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None) -> None:
        self.ptr = id(self)
        self._queue: deque[_Work] = deque()
        self._done = 0  # number of the last work that ran
        CLOCK.streams.append(self)

    def use(self) -> Stream:
        CLOCK.current = self
        return self

    def synchronize(self) -> None:
        self._run_to(CLOCK.issued)

    def wait_event(self, event: Event) -> None:
        self._issue("wait for an event", [], event.synchronize)

    def _issue(self, name: str, ranges: list[Range], run: Callable[[], None]) -> None:
        CLOCK.issued += 1
        self._queue.append(_Work(CLOCK.issued, name, ranges, run))

    def _run_to(self, number: int) -> None:
        while self._queue and self._queue[0].number <= number:
            work = self._queue.popleft()
            work.run()
            for other in CLOCK.streams:
                for older in list(other._queue) if other is not self else ():  # the collector may free an array now: one memset more
                    if older.number > work.number:  # queues are in the order of issue
                        break
                    if overlap(older.ranges, work.ranges):
                        raise RuntimeError(f"{work.name} ran before {older.name}, issued earlier on another stream, and both "
                                           "touch the same memory: an event is missing between them")
            self._done = max(self._done, work.number)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._stream: Stream | None = None
        self._number, self._asked, self._timed = 0, 0, not disable_timing

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            raise RuntimeError("an event recorded on the default stream orders nothing here")
        self._stream, self._number, self._asked = stream, CLOCK.issued, 0

    def synchronize(self) -> None:
        assert self._stream is not None
        self._stream._run_to(self._number)

    @property
    def done(self) -> bool:
        """A GPU goes on by itself: asked again, the work is done."""
        assert self._stream is not None
        if self._stream._queue and self._stream._queue[0].number <= self._number:
            self._asked += 1
            if self._asked == 1:
                return False
            self.synchronize()
        return True


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds; here one for each piece of work between the two."""
    for event in (start_event, end_event):
        if not event._timed or event._stream is None or any(work.number <= event._number for work in event._stream._queue):
            raise RuntimeError("an event that was not made for timing, or is not done")
    return float(end_event._number - start_event._number)


def stream_of_work(stream: Stream | None = None) -> Stream:
    found = stream or CLOCK.current
    if found is None:
        raise RuntimeError("no stream is current: work would go to the default stream")
    return found


# -- memory ----------------------------------------------------------------------------------
class MemoryPool:
    """Blocks are cut in steps of 512 bytes and, once free, used again by the next request of that size on that stream."""

    def __init__(self) -> None:
        self._free: dict[tuple[Stream, int], list[np.ndarray]] = {}
        self._held: dict[int, int] = {}  # bytes that were asked for, by address

    def malloc(self, size: int) -> MemoryPointer:
        place = stream_of_work(), -(-size // 512) * 512
        if self._free.get(place):
            block = self._free[place].pop()
            address = block.ctypes.data
            place[0]._issue("reuse of memory", [(address, address + block.size, True)], lambda: block.fill(0xFF))
        else:
            space = np.full(place[1] + 512, 0xFF, np.uint8)
            block = space[-space.ctypes.data % 512:][:place[1]]
        self._held[block.ctypes.data] = size
        return MemoryPointer(_Pooled(self._free.setdefault(place, []), block, self._held), 0)

    def _holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in a block that is in use, within what was asked for."""
        return any(start <= address and address + nbytes <= start + size for start, size in list(self._held.items()))


class _Pooled:
    def __init__(self, home: list[np.ndarray], block: np.ndarray, held: dict[int, int]) -> None:
        self.home, self.block, self.ptr, self.size, self.held = home, block, block.ctypes.data, block.size, held

    def __del__(self) -> None:
        del self.held[self.ptr]
        self.home.append(self.block)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = ptr, size, owner


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def memset_async(self, value: int, size: int, stream: Stream | None = None) -> None:
        target = at(self.ptr, size)
        stream_of_work(stream)._issue("memset", [(self.ptr, self.ptr + size, True)], lambda: target.fill(value))

    def copy_from_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        target, source = at(self.ptr, size), at(mem, size)
        stream_of_work(stream)._issue("copy from the host", [(self.ptr, self.ptr + size, True), (mem, mem + size, False)],
                               lambda: np.copyto(target, source))

    def copy_to_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        target, source = at(mem, size), at(self.ptr, size)
        stream_of_work(stream)._issue("copy to the host", [(self.ptr, self.ptr + size, False), (mem, mem + size, True)],
                               lambda: np.copyto(target, source))


POOL = MemoryPool()
_PINNED: list[np.ndarray] = []  # kept for ever: what reads freed pinned memory finds poison, not an unmapped page


def alloc_pinned_memory(size: int) -> Any:
    _PINNED.append(np.full(size, 0xFF, np.uint8))
    poison = _PINNED[-1].fill
    kind = type("PinnedMemoryPointer", (ctypes.c_uint8 * size,), {"__del__": lambda self: poison(0xFF)})
    return kind.from_buffer(_PINNED[-1])  # type: ignore[attr-defined]


# -- arrays ----------------------------------------------------------------------------------
class ndarray:
    """What the device may do with an array: look at its shape, take views, fill, copy to another, pass it to a kernel."""

    __array_ufunc__ = None  # NumPy must not compute with it

    def __init__(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None,
                 order: str = "C") -> None:
        self.dtype = np.dtype(dtype)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.size = prod(self.shape)
        if memptr is None and self.size:
            raise RuntimeError("an array outside the account: it was not made by the device")
        self.data = memptr if memptr is not None else MemoryPointer(UnownedMemory(0, 0, None), 0)
        self.itemsize, self.nbytes, self.ndim = self.dtype.itemsize, self.size * self.dtype.itemsize, len(self.shape)
        if strides is None:
            strides = tuple(self.itemsize * prod(self.shape[i + 1:]) for i in range(self.ndim))
        self.strides = tuple(strides)

    # -- views
    @property
    def _span(self) -> int:
        """Bytes from the first element's start to the last one's end."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize if self.size else 0

    def _host(self) -> np.ndarray:
        """NumPy's view of the memory: its values are to be used only by work that runs."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, at(self.data.ptr, self._span), 0, self.strides)

    def _touched(self, written: bool) -> list[Range]:
        return [(self.data.ptr, self.data.ptr + self._span, written)]

    def _seen_as(self, view: np.ndarray) -> ndarray:
        """The array that a view of `host()` is of."""
        pointer = MemoryPointer(self.data.mem, view.ctypes.data - self.data.mem.ptr) if view.size else None
        return ndarray(view.shape, view.dtype, pointer, view.strides)

    @property
    def T(self) -> ndarray:
        return ndarray(self.shape[::-1], self.dtype, self.data, self.strides[::-1])

    def reshape(self, *shape: Any) -> ndarray:
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._seen_as(self._host().reshape(shape, copy=False))

    def view(self, dtype: Any) -> ndarray:
        return self._seen_as(self._host().view(dtype))

    def __getitem__(self, key: Any) -> ndarray:
        for part in key if isinstance(key, tuple) else (key,):
            if not (part is Ellipsis or isinstance(part, int | slice)):
                raise TypeError(f"an index of {type(part).__name__} makes a copy")
        return self._seen_as(self._host()[key if isinstance(key, tuple) else (key,)][...])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    # -- work
    def fill(self, value: float) -> None:
        if not isinstance(value, int | float):
            raise TypeError(f"fill with {type(value).__name__}")
        target = self._host()
        stream_of_work()._issue("fill", self._touched(True), lambda: target.fill(value))

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        if not isinstance(value, ndarray):
            target.fill(value)
            return
        if value.dtype != target.dtype or value.shape != target.shape:
            raise TypeError(f"assigning {value.dtype} {value.shape} to {target.dtype} {target.shape} converts or broadcasts")
        a, b = target._host(), value._host()
        stream_of_work()._issue("assignment", target._touched(True) + value._touched(False), lambda: np.copyto(a, b))

    def get(self, stream: Stream | None = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        stream_of_work(stream).synchronize()
        return np.array(self._host())

    # -- what is not allowed
    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __float__(self) -> float:
        raise TypeError("implicit conversion to a Python number waits for the GPU")

    __int__ = __bool__ = __index__ = __float__

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        for stream in CLOCK.streams:
            for work in stream._queue:
                if any(a < self.data.ptr + self.nbytes and self.data.ptr < b for a, b, _ in work.ranges):
                    raise RuntimeError(f"device memory was given away while work on it is still to come: {work.name}")
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "version": 3,
                "strides": None if self.nbytes == 0 else self.strides}


def concatenate(tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> ndarray:
    kinds = {part.dtype for part in tup}
    if not all(isinstance(part, ndarray) and part.ndim == 1 for part in tup) or len(kinds) != 1 or axis or out or dtype:
        raise TypeError("concatenate is for flat CuPy arrays of one type")
    size = sum(part.size for part in tup)
    made = ndarray((size,), kinds.pop(), POOL.malloc(size * tup[0].itemsize))
    sources = [part._host() for part in tup]
    stream_of_work()._issue("concatenate", [r for part in tup for r in part._touched(False)] + made._touched(True),
                     lambda: np.concatenate(sources, out=made._host()))
    return made
