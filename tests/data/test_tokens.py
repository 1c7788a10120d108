"""Token pieces join without copying and refuse ids that are not in the vocabulary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.config import ConfigError
from mpshard.data import tokens as module
from mpshard.data.tokens import Tokens, array_piece, bin_piece, npy_piece


@given(lengths=st.lists(st.integers(0, 5), max_size=8), data=st.data())
def test_reads_equal_the_concatenation(lengths, data):
    whole = np.arange(sum(lengths))
    parts = np.split(whole, np.cumsum(lengths)[:-1]) if lengths else []
    tokens = Tokens([array_piece(str(i), part) for i, part in enumerate(parts)], vocab_size=100)
    assert len(tokens) == len(whole)
    length = data.draw(st.integers(0, len(whole)))
    starts = data.draw(st.lists(st.integers(0, len(whole) - length), max_size=4))
    read = tokens.read(starts, length)
    assert read.dtype == np.int64 and read.shape == (len(starts), length)
    for row, start in zip(read, starts, strict=True):
        np.testing.assert_array_equal(row, whole[start : start + length])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_files_are_mapped_little_endian(tmp_path, dtype):
    ids = np.array([1, 2, 300, 65535, 4], dtype)
    ids.astype(ids.dtype.newbyteorder("<")).tofile(tmp_path / "a.bin")
    piece = bin_piece(str(tmp_path / "a.bin"), dtype)
    assert isinstance(piece.open(), np.memmap)
    np.testing.assert_array_equal(Tokens([piece, piece], 65536).read([3], 4)[0], [65535, 4, 1, 2])


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u4", "int64"])
def test_npy_files_of_any_integer_type(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([1, 2, 99], dtype))
    piece = npy_piece(str(tmp_path / "a.npy"))
    assert isinstance(piece.open(), np.memmap)
    np.testing.assert_array_equal(Tokens([piece], 100).read([1], 2)[0], [2, 99])


def test_odd_bin_file(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"a\.bin has 3 bytes, so it is not uint16; is data\.token_dtype right\?"):
        bin_piece(str(tmp_path / "a.bin"), "uint16")


@pytest.mark.parametrize(
    ("array", "message"), [(np.zeros(3), "float64 of shape"), (np.zeros((2, 2), int), r"shape \(2, 2\)")]
)
def test_npy_that_holds_no_ids(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ConfigError, match=message):
        npy_piece(str(tmp_path / "a.npy"))


def test_npy_that_is_none(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"not numpy")
    with pytest.raises(ConfigError, match=r"a\.npy is not a \.npy file of integers") as caught:
        npy_piece(str(tmp_path / "a.npy"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ids", "place"), [([0, 101, 5], 1), ([0, 1, -1], 2)])
def test_ids_outside_the_vocabulary_are_refused_at_once(ids, place):
    with pytest.raises(ConfigError, match=f"b has id {ids[place]} at token {place}, outside the vocabulary of 101"):
        Tokens([array_piece("a", np.arange(5)), array_piece("b", np.array(ids))], 101)


def test_far_ids_are_refused_when_read(monkeypatch):
    monkeypatch.setattr(module, "_CHECKED_AT_OPEN", 4)
    tokens = Tokens([array_piece("a", np.array([0, 1, 2, 3, 4, 5, 600]))], 256)
    tokens.read([0], 6)
    with pytest.raises(ConfigError, match="a has id 600 at token 6"):
        tokens.read([4], 3)


def test_reading_past_the_end():
    tokens = Tokens([array_piece("a", np.arange(5))], 256)
    for start in (-1, 3):
        with pytest.raises(IndexError):
            tokens.read([start], 3)


def test_few_files_are_mapped_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_MAPPED", 3)
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 2)
    tokens = Tokens([bin_piece(str(tmp_path / f"{i}.txt"), "uint8") for i in range(10)], 256)
    np.testing.assert_array_equal(tokens.read([0], 20)[0], np.repeat(np.arange(10), 2))
    assert len(tokens._mapped) == 3


def test_a_file_that_changed_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abcd")
    tokens = Tokens([bin_piece(str(path), "uint8")], 256)
    path.write_bytes(b"abcdef")
    with pytest.raises(ConfigError, match=r"a\.txt had 4 tokens, now 6"):
        tokens.read([0], 2)
