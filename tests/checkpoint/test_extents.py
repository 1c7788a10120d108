"""Byte ranges: every byte of every extent is moved once, in bounded transfers."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpshard.checkpoint.checksums import join
from mpshard.checkpoint.extents import batches, cut, extent
from mpshard.checkpoint.safetensors_file import lay_out

sizes = st.lists(st.tuples(st.sampled_from(["F32", "BF16", "F64", "U8"]), st.integers(0, 40)), min_size=1, max_size=6)


@given(sizes, st.data())
def test_transfers_cover_the_extents_and_nothing_else(sizes, data):
    _, tensors = lay_out([(str(i), dtype, (n,)) for i, (dtype, n) in enumerate(sizes)])
    chosen = []
    for tensor in tensors.values():
        start = data.draw(st.integers(0, tensor.size))
        chosen.append(extent(tensor, start, data.draw(st.integers(start, tensor.size))))
    limit = data.draw(st.integers(8, 200))
    plan = batches(chosen, limit)
    content = np.random.default_rng(0).integers(0, 256, max(t.stop for t in tensors.values()), np.uint8)
    got = [np.full(e.nbytes, -1) for e in chosen]
    for batch in plan:
        assert 0 < batch.nbytes <= limit
        raw = content[batch.offset:batch.offset + batch.nbytes]
        filled = 0
        for part in batch.parts:
            size = chosen[part.index].itemsize
            assert part.at == filled  # the parts fill the batch without gaps
            got[part.index][part.lo * size:part.hi * size] = raw[part.at:part.at + (part.hi - part.lo) * size]
            filled += (part.hi - part.lo) * size
        assert filled == batch.nbytes
    for e, bytes_of in zip(chosen, got, strict=True):
        np.testing.assert_array_equal(bytes_of, content[e.offset:e.offset + e.nbytes])


def test_neighbours_in_the_file_travel_together():
    _, tensors = lay_out([("a", "F32", (3,)), ("b", "BF16", (5,)), ("c", "F32", (2,))])
    whole = [extent(t, 0, t.size) for t in tensors.values()]
    assert [b.nbytes for b in batches(whole, 1000)] == [12 + 10 + 8]
    assert [b.nbytes for b in batches([whole[0], whole[2]], 1000)] == [12, 8]
    assert [b.nbytes for b in batches(whole, 16)] == [16, 14]  # b is cut between elements


@given(st.integers(0, 30), st.integers(0, 30), st.lists(st.integers(0, 40)).map(sorted))
def test_cuts_lie_at_the_ends_asked_for(start, length, ends):
    _, tensors = lay_out([("a", "F32", (60,))])
    whole = extent(tensors["a"], start, start + length)
    parts = list(cut(whole, ends))
    assert b"".join(bytes(range(p.start, p.stop)) for p in parts) == bytes(range(start, start + length))
    assert {p.stop for p in parts} == ({e for e in ends if start < e < start + length} | {start + length} if length else set())
    for p in parts:
        assert p == extent(tensors["a"], p.start, p.stop)


@given(st.binary(), st.lists(st.integers(0, 1000)))
def test_checksums_of_pieces_join_to_that_of_the_whole(content, places):
    """The value taken as right is zlib's over the whole."""
    ends = sorted({min(place, len(content)) for place in places} | {len(content)})
    crc = start = 0
    for end in ends:
        crc, start = join(crc, zlib.crc32(content[start:end]), end - start), end
    assert crc == zlib.crc32(content)


def test_checksums_join_over_more_than_four_gibibytes():
    """Of 5 GiB of zeros behind "abc"; computed once by zlib.crc32 over the bytes themselves."""
    zeros = 0
    block = zlib.crc32(bytes(1 << 20))
    for _ in range(5 << 10):
        zeros = join(zeros, block, 1 << 20)
    assert join(zlib.crc32(b"abc"), zeros, 5 << 30) == 0x72B398A4
