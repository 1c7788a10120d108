"""A buffer pool in host memory, and the account of what it holds.

Large temporaries allocated afresh cost a page fault for every 4 KiB they touch, about as much as the
arithmetic done on them. The pool keeps memory once touched and hands it out again. Peak resident memory
is as important as speed, so blocks are cut to size (best fit), not rounded to size classes, and free
neighbours are joined at once. Small blocks are many and come again in the same sizes, so those are kept
apart as they are, by size, until there is nothing of a size that is asked for and they have become many.

Note on lifetimes. `BufferPool.empty` returns an ordinary ndarray whose `base` is a `_Lease`; every view
of the array keeps the lease alive, and the block goes back when the last of them dies. `_Lease.__del__`
may run at any moment, in any thread, even inside the pool (the garbage collector chooses), so it takes no
lock and only appends to a deque, which is atomic; the pool reads the deque at its next call.
"""

from __future__ import annotations

import math
import mmap
import threading
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import numpy as np

from mpshard.device.base import Kind

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
PAGE = 2 << 20  # bytes: a huge page, the unit in which arenas grow and are trimmed
ARENA = 64 << 20  # bytes: address space asked for at a time; only touched pages become resident
SMALL = 1 << 20  # bytes: up to here a block that comes back waits for the next of its size
MANY = 4 << 20  # bytes of such blocks
_ARENA_STRIDE = 1 << 46  # block number = arena index * stride + offset: arenas never look adjacent


class _Lease(np.ndarray):
    """The bytes of one block as a flat uint8 array; tells the pool when nobody refers to them any more."""

    __slots__ = ("block",)
    block: tuple[BufferPool, tuple[int, int, int, Kind]]  # whose, and: start, size, bytes asked for, kind

    def __del__(self) -> None:
        try:
            pool, block = self.block
        except AttributeError:  # a signal's exception came before the pool had said whose it is
            return
        if pool.poison:
            self.fill(0xFF)
        pool._returned.append(block)


class BufferPool:
    """Hands out uninitialised arrays and takes their memory back by itself; counts bytes by `Kind`.

    Parameters
    ----------
    poison : bool
        Fill blocks with 0xFF bytes (NaN in every floating-point format) when handed out and when given
        back, so that a result which depends on old or freed memory shows.

    Counted are the bytes asked for; `reserved` adds what alignment and free blocks take. Thread-safe.
    """

    def __init__(self, poison: bool = False) -> None:
        self.poison = poison
        self._lock = threading.Lock()
        self._arenas: dict[int, mmap.mmap] = {}
        self._free: list[tuple[int, int]] = []  # (size, start) of every free block, sorted: best fit by bisection
        self._size_at: dict[int, int] = {}  # start of a free block -> its size
        self._start_before: dict[int, int] = {}  # end of a free block -> its start
        self._waiting: dict[int, list[int]] = {}  # size of small free blocks, in neither of the above -> their starts
        self._waiting_bytes = 0
        self._returned: deque[tuple[int, int, int, Kind]] = deque()
        self._current = dict.fromkeys(Kind, 0)
        self._peak = dict.fromkeys(Kind, 0)
        self._total = self._total_peak = 0

    def empty(self, shape: int | tuple[int, ...], dtype: Any, kind: Kind = Kind.ACTIVATION) -> np.ndarray:
        """An uninitialised C-contiguous array, 64-byte aligned."""
        dtype = np.dtype(dtype)
        nbytes = int(math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._returned:
                self._drain()
            if waiting := self._waiting.get(size):
                start = waiting.pop()
                self._waiting_bytes -= size
            else:
                start = self._take(size)
            self._count(kind, nbytes)
            index, offset = divmod(start, _ARENA_STRIDE)
            lease = _Lease(nbytes, np.uint8, self._arenas[index], offset)
            lease.block = self, (start, size, nbytes, kind)
        if self.poison:
            lease.fill(0xFF)
        return np.ndarray(shape, dtype, lease)

    def current(self, kind: Kind | None = None) -> int:
        """Bytes held now, of one kind or in all."""
        with self._lock:
            self._drain()
            return self._total if kind is None else self._current[kind]

    def peak(self, kind: Kind | None = None) -> int:
        """Most bytes ever held at once since the start or `reset_peak`; for None the peak of the total."""
        with self._lock:
            return self._total_peak if kind is None else self._peak[kind]

    def reset_peak(self) -> None:
        """Start counting peaks anew, from what is held now."""
        with self._lock:
            self._drain()
            self._peak = dict(self._current)
            self._total_peak = self._total

    def count(self, kind: Kind, nbytes: int) -> None:
        """Take memory into the account that somebody else holds for this rank (a shared window)."""
        with self._lock:
            self._count(kind, nbytes)

    @property
    def reserved(self) -> int:
        """Bytes of address space held from the system: a bound on what the pool makes resident."""
        with self._lock:
            return sum(len(arena) for arena in self._arenas.values())

    def trim(self) -> None:
        """Give the memory of free blocks back to the system; it is faulted in again when next used."""
        with self._lock:
            self._drain()
            self._join()
            for size, start in list(self._free):
                index, offset = divmod(start, _ARENA_STRIDE)
                if size == len(self._arenas[index]):
                    self._forget(size, start)
                    del self._arenas[index]  # unmapped when the last lease's reference to it is gone: there is none
                    continue
                first, last = -(-offset // PAGE) * PAGE, (offset + size) // PAGE * PAGE
                if last > first and hasattr(mmap, "MADV_DONTNEED"):
                    self._arenas[index].madvise(mmap.MADV_DONTNEED, first, last - first)

    # -- under the lock ----------------------------------------------------------------------
    def _count(self, kind: Kind, nbytes: int) -> None:
        current = self._current[kind] = self._current[kind] + nbytes
        self._total += nbytes
        if current > self._peak[kind]:
            self._peak[kind] = current
        if self._total > self._total_peak:
            self._total_peak = self._total

    def _drain(self) -> None:
        """Take back the blocks whose leases have died since the last call."""
        while self._returned:
            start, size, nbytes, kind = self._returned.popleft()
            self._current[kind] -= nbytes
            self._total -= nbytes
            if size <= SMALL:
                self._waiting.setdefault(size, []).append(start)
                self._waiting_bytes += size
            else:
                self._give(size, start)

    def _join(self) -> None:
        """Put the small blocks among the others."""
        for size, starts in self._waiting.items():
            for start in starts:
                self._give(size, start)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _take(self, size: int) -> int:
        """The start of `size` bytes cut from the smallest free block that has them."""
        position = bisect_left(self._free, (size, 0))
        if self._waiting_bytes > MANY or (position == len(self._free) and self._waiting_bytes):
            self._join()
            position = bisect_left(self._free, (size, 0))
        if position == len(self._free):
            self._grow(size)
            position = bisect_left(self._free, (size, 0))
        found, start = self._free.pop(position)
        del self._size_at[start], self._start_before[start + found]
        if found > size:
            self._insert(found - size, start + size)
        return start

    def _give(self, size: int, start: int) -> None:
        """Put a block among the free ones, joined with free neighbours."""
        after = self._size_at.get(start + size)
        if after is not None:
            self._forget(after, start + size)
            size += after
        before = self._start_before.get(start)
        if before is not None:
            self._forget(start - before, before)
            size, start = size + start - before, before
        self._insert(size, start)

    def _insert(self, size: int, start: int) -> None:
        insort(self._free, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start

    def _forget(self, size: int, start: int) -> None:
        del self._free[bisect_left(self._free, (size, start))]
        del self._size_at[start], self._start_before[start + size]

    def _grow(self, size: int) -> None:
        length = max(ARENA, -(-size // PAGE) * PAGE)
        # Private: huge pages serve private memory only, and a forked child must not write into ours.
        arena = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                arena.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel built without them: small pages do as well, a little slower
                pass
        index = max(self._arenas, default=-1) + 1
        self._arenas[index] = arena
        self._give(length, index * _ARENA_STRIDE)
