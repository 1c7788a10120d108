"""The buffer pool: lifetimes, reuse, accounting, fragmentation, poison, threads."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpshard.device.base import Kind
from mpshard.device.pool import ALIGNMENT, ARENA, MANY, PAGE, SMALL, BufferPool


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def check_free_list(pool: BufferPool) -> None:
    """The three indices of the free list agree, and no two free blocks touch."""
    blocks = sorted((start, size) for size, start in pool._free)
    assert pool._free == sorted(pool._free)
    assert dict(blocks) == pool._size_at
    assert {start + size: start for start, size in blocks} == pool._start_before
    assert all(a + size < b for (a, size), (b, _) in zip(blocks, blocks[1:], strict=False))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int64, bool])
def test_arrays_are_ordinary(dtype):
    array = BufferPool().empty((3, 5), dtype)
    assert type(array) is np.ndarray and array.shape == (3, 5) and array.dtype == dtype
    assert array.flags.c_contiguous and array.flags.writeable and address(array) % ALIGNMENT == 0


@pytest.mark.parametrize("shape", [0, (0,), (3, 0, 2)])
def test_arrays_of_nothing(shape):
    pool = BufferPool()
    assert pool.empty(shape, np.float32).size == 0 and pool.current() == 0


def test_a_scalar_shape():
    assert BufferPool().empty((), np.float32).shape == ()


def test_block_returns_with_the_last_view():
    pool = BufferPool()
    array = pool.empty((8, 8), np.float32)
    first = address(array)
    view = array[2:].T.reshape(-1)[:0]  # a copy
    view = array[2:].T
    del array
    assert pool.current() == 256
    view = view[1:2].view(np.uint32)
    assert pool.current() == 256
    del view
    assert pool.current() == 0
    assert address(pool.empty((8, 8), np.float32)) == first


def test_steady_state_takes_no_new_memory():
    pool = BufferPool()

    def step() -> set[int]:
        kept = [pool.empty(n, np.float32) for n in (1000, 300_000, 77, 5_000_000, 40_000)]
        return {address(a) for a in kept}

    first, reserved = step(), pool.reserved
    assert all(step() == first for _ in range(5)) and pool.reserved == reserved


def test_accounting_by_kind():
    pool = BufferPool()
    weights = pool.empty(10, np.float64, Kind.PARAMETER)
    a = pool.empty(100, np.float32)
    del a
    b = pool.empty(5, np.uint8, Kind.STAGING)
    assert (pool.current(Kind.PARAMETER), pool.current(Kind.ACTIVATION), pool.current(Kind.STAGING)) == (80, 0, 5)
    assert pool.current() == 85
    assert (pool.peak(Kind.ACTIVATION), pool.peak(Kind.STAGING), pool.peak()) == (400, 5, 480)
    pool.reset_peak()
    assert pool.peak() == 85 and pool.peak(Kind.ACTIVATION) == 0 and pool.peak(Kind.PARAMETER) == 80
    del weights, b


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=60), st.randoms(use_true_random=False))
def test_live_arrays_never_overlap(steps, random):
    pool, live = BufferPool(), []
    for allocate, nbytes in steps:
        if allocate or not live:
            array = pool.empty(nbytes, np.uint8)
            array.fill(len(live) % 251)
            live.append((array, len(live) % 251, nbytes))
        else:
            array, value, _ = live.pop(random.randrange(len(live)))
            assert (array == value).all()
        del array
        assert pool.current() == sum(n for _, _, n in live)
        check_free_list(pool)
    assert all((array == value).all() for array, value, _ in live)
    live.clear()
    assert pool.current() == 0
    pool.trim()  # joins the small ones
    assert [size for size, _ in pool._free] == [len(a) for a in pool._arenas.values()]


def test_small_blocks_of_ever_new_sizes_do_not_pile_up():
    """Those that wait for others of their size are joined before they take more than a few MiB."""
    pool = BufferPool()
    ends = [address(array) + array.nbytes for nbytes in range(64, SMALL, 640) for array in [pool.empty(nbytes, np.uint8)]]
    assert max(ends) - min(ends) <= 2 * MANY + SMALL and pool.reserved == ARENA
    check_free_list(pool)


def test_a_small_block_goes_to_the_next_of_its_size():
    """Though a smaller one would leave less of it."""
    pool = BufferPool()
    kept, freed = [pool.empty(4096, np.uint8) for _ in range(2)], pool.empty(SMALL, np.uint8)
    where = address(freed)
    del freed
    other = pool.empty(100, np.uint8)
    assert address(pool.empty(SMALL, np.uint8)) == where
    del kept, other


def test_freed_neighbours_join():
    pool = BufferPool()
    parts = [pool.empty(ARENA // 4, np.uint8) for _ in range(4)]
    first = min(map(address, parts))
    for index in (1, 3, 0, 2):
        parts[index] = None
    whole = pool.empty(ARENA, np.uint8)
    assert address(whole) == first and pool.reserved == ARENA


def test_larger_than_an_arena_and_trim():
    pool = BufferPool()
    kept = pool.empty(10, np.uint8)
    kept.fill(7)
    big = pool.empty(ARENA + 1, np.uint8)
    big[-1] = 1
    assert pool.reserved == 2 * ARENA + PAGE
    del big
    pool.trim()
    assert pool.reserved == ARENA and (kept == 7).all()
    again = pool.empty(1000, np.uint8)
    again.fill(1)
    check_free_list(pool)


def test_poison_marks_new_and_returned_memory():
    pool = BufferPool(poison=True)
    array = pool.empty(16, np.float32)
    assert np.isnan(array).all()
    array.fill(1)
    # Stand in for a stale pointer: memory reached without a reference to the lease.
    arena = np.frombuffer(next(iter(pool._arenas.values())), np.float32)
    assert (arena[:16] == 1).all()
    del array
    assert np.isnan(arena[:16]).all()


def test_release_by_another_thread_and_by_the_collector():
    pool = BufferPool()
    boxes = [[pool.empty(1000, np.float32)] for _ in range(50)]
    for box in boxes:
        box.append(box)  # a cycle: only the collector frees it, at a moment of its own
    thread = threading.Thread(target=boxes.clear)
    thread.start()
    while thread.is_alive():
        pool.empty(10, np.float32)
    thread.join()
    del box
    gc.collect()
    assert pool.current() == 0
    check_free_list(pool)


def test_threads_share_a_pool():
    pool, failures = BufferPool(), []

    def work(value: int) -> None:
        random = np.random.default_rng(value)
        for _ in range(200):
            array = pool.empty(int(random.integers(1, 5000)), np.uint8)
            array.fill(value)
            if not (array == value).all():
                failures.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and pool.current() == 0
    check_free_list(pool)
