"""Every element of every parameter lies in exactly one rank's slice, whatever the shapes and the number of ranks."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpshard.shard.layout import ALIGN, Layout, lay_out

# Scalars (), zero sizes, sizes under the world's and uneven ones.
shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)
worlds = st.integers(1, 9)
aligns = st.sampled_from([1, 2, 3, ALIGN])


def layout_of(shapes: list[tuple[int, ...]], world: int, align: int) -> Layout:
    return lay_out([(f"p{i}", shape) for i, shape in enumerate(shapes)], world, align)


@given(shapes, worlds, aligns)
@example([], 3, ALIGN)
@example([()], 4, 1)
@example([(0,), (0, 5)], 2, ALIGN)
@example([(2,), (), (0,), (101, 26)], 3, ALIGN)
def test_segments_of_all_ranks_tile_every_parameter_once(shapes, world, align):
    layout = layout_of(shapes, world, align)
    seen = {p.name: np.zeros(p.size, int) for p in layout.placements}
    for rank in range(world):
        used = np.zeros(layout.shard_size, int)
        for segment in layout.segments(rank):
            assert segment.size > 0
            seen[segment.name][segment.start:segment.stop] += 1
            used[segment.slice] += 1
        assert used.max(initial=0) <= 1
    for name, count in seen.items():
        assert (count == 1).all(), name


@given(shapes, worlds, aligns)
def test_slices_put_together_are_the_parameters_in_order(shapes, world, align):
    layout = layout_of(shapes, world, align)
    values = {p.name: np.random.default_rng(i).random(p.size) for i, p in enumerate(layout.placements)}
    full = np.full(layout.padded_size, np.nan)  # as a gather fills it: slice after slice
    for rank in range(world):
        shard = full[rank * layout.shard_size:(rank + 1) * layout.shard_size]
        for segment in layout.segments(rank):
            shard[segment.slice] = values[segment.name][segment.start:segment.stop]
    for place, shape in zip(layout.placements, shapes, strict=True):
        assert place.shape == shape and place.size == prod(shape)
        np.testing.assert_array_equal(full[place.offset:place.end], values[place.name])
    assert np.isnan(full[layout.size:]).all()


@given(shapes, worlds, aligns)
def test_padding_is_the_least_that_divides(shapes, world, align):
    layout = layout_of(shapes, world, align)
    assert layout.size == sum(prod(shape) for shape in shapes)
    assert layout.shard_size * world == layout.padded_size >= layout.size
    assert layout.shard_size % align == 0
    assert layout.padded_size - layout.size < world * align


@given(shapes, worlds)
def test_slices_of_default_alignment_start_at_cache_lines(shapes, world):
    layout = layout_of(shapes, world, ALIGN)
    assert all(rank * layout.shard_size * np.dtype("f4").itemsize % 64 == 0 for rank in range(world))


def test_a_small_layout_by_hand():
    layout = lay_out([("a", (2, 3)), ("s", ()), ("z", (0, 4)), ("b", (5,))], world=2, align=4)
    assert [(p.name, p.offset) for p in layout.placements] == [("a", 0), ("s", 6), ("z", 7), ("b", 7)]
    assert (layout.size, layout.shard_size, layout.padded_size) == (12, 8, 16)
    assert [(s.name, s.start, s.stop, s.offset) for s in layout.segments(0)] == [("a", 0, 6, 0), ("s", 0, 1, 6), ("b", 0, 1, 7)]
    assert [(s.name, s.start, s.stop, s.offset) for s in layout.segments(1)] == [("b", 1, 5, 0)]


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        lay_out([], world=0)
    with pytest.raises(ValueError, match="two parameters of one name"):
        lay_out([("a", (1,)), ("a", (2,))], world=1)


@given(st.integers(0, 20), st.tuples(st.integers(1, 30), st.integers(1, 9)), st.integers(0, 20), worlds, aligns)
def test_rows_of_a_table_lie_whole_in_one_slice_or_are_shared(before, shape, after, world, align):
    """Every row is one slice's at most, where `place` says, and a row that is nobody's crosses a border."""
    layout = lay_out([("before", (before,)), ("table", shape), ("after", (after,))], world, align)
    table, full = layout.table("table", world), np.arange(layout.padded_size)
    rows = full[before:before + shape[0] * shape[1]].reshape(shape)
    owner = np.full(shape[0], -1)
    for rank in range(world):
        whole, part = table.whole(rank), full[rank * layout.shard_size:(rank + 1) * layout.shard_size]
        np.testing.assert_array_equal(part[table.place(rank)].reshape(-1, shape[1]), rows[whole.start:whole.stop])
        assert (owner[whole.start:whole.stop] == -1).all()
        owner[whole.start:whole.stop] = rank
    for row in rows[owner == -1]:
        assert row[0] // layout.shard_size != row[-1] // layout.shard_size
