"""The format, against the reference implementation where it is installed, and against bytes written by hand."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.checkpoint.dtypes import SIZES
from mpshard.checkpoint.safetensors_file import FormatError, index, lay_out, parse, split

names = st.text(min_size=1).filter(lambda name: name != "__metadata__")
specs = st.lists(
    st.tuples(names, st.sampled_from(sorted(SIZES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    unique_by=lambda spec: spec[0])


def parse_bytes(content: bytes):
    return parse(lambda offset, size: content[offset:offset + size], len(content))


def file_of(specs) -> bytes:
    header, tensors = lay_out(specs)
    return header + bytes(max((t.stop for t in tensors.values()), default=len(header)) - len(header))


@given(specs)
def test_what_is_laid_out_is_parsed_back(specs):
    header, tensors = lay_out(specs)
    assert len(header) % 64 == 0
    assert parse_bytes(file_of(specs)) == tensors
    end = len(header)
    for name, dtype, shape in specs:  # in order, end to end
        tensor = tensors[name]
        assert (tensor.dtype, tensor.shape, tensor.start) == (dtype, shape, end)
        end += prod(shape) * SIZES[dtype]
        assert tensor.stop == end


def test_a_file_written_by_hand():
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}'
    found = parse_bytes(len(text).to_bytes(8, "little") + text + bytes(10))
    assert [(t.name, t.dtype, t.shape, t.start - 8 - len(text), t.stop - 8 - len(text)) for t in found.values()] == [
        ("a", "F32", (2,), 0, 8), ("b", "BF16", (), 8, 10)]


def test_the_reference_implementation_reads_and_writes_the_same(tmp_path):
    reference = pytest.importorskip("safetensors.numpy")
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.array(2, np.int64), "none": np.empty((0, 4), np.float16)}
    header, tensors = lay_out([("x", "F32", (2, 3)), ("scalar", "I64", ()), ("none", "F16", (0, 4))])
    data = b"".join(arrays[name].tobytes() for name in tensors)
    (tmp_path / "ours").write_bytes(header + data)
    for name, array in reference.load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, arrays[name])
    reference.save_file(arrays, tmp_path / "theirs")
    content = (tmp_path / "theirs").read_bytes()
    for name, tensor in parse_bytes(content).items():
        assert content[tensor.start:tensor.stop] == arrays[name].tobytes()


GOOD = file_of([("a", "F32", (4,)), ("b", "F32", (2, 2))])


@pytest.mark.parametrize(("content", "words"), [
    (b"", "truncated"), (GOOD[:7], "truncated"), (GOOD[:40], "truncated"), (GOOD[:-1], "truncated"),
    (GOOD + b"x", "1 bytes too many"), (b"PK\x03\x04" * 20, "not a safetensors file"),
    (GOOD.replace(b'"F32"', b'"F64"'), "do not follow or do not fit"), (GOOD.replace(b'"F32"', b'"F99"'), "F99"),
    (GOOD.replace(b'"shape":[4]', b'"shape":[5]'), "a do not follow or do not fit"),
    (GOOD.replace(b"data_offsets", b"data_0ffsets"), "damaged header"), (GOOD.replace(b"{", b"[", 1), "damaged header"),
])
def test_what_is_truncated_or_altered_is_refused(content, words):
    with pytest.raises(FormatError, match=words):
        parse_bytes(content)


@given(specs, st.integers(0, 300))
def test_a_model_is_split_in_order_and_no_file_is_over_the_limit_without_need(specs, limit):
    files = split(specs, limit)
    assert [spec for of_file in files.values() for spec in of_file] == specs
    assert list(files) == sorted(files)
    for of_file in files.values():
        assert not limit or len(of_file) <= 1 or sum(prod(s) * SIZES[d] for _, d, s in of_file) <= limit


def test_names_of_split_files_and_their_index_are_hugging_faces():
    files = split([("a", "F32", (4,)), ("b", "F32", (4,)), ("c", "F32", (1,))], 20)
    assert {file: [s[0] for s in of_file] for file, of_file in files.items()} == {
        "model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}
    assert index(files) == {"metadata": {"total_size": 36}, "weight_map": {
        "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}}
    json.dumps(index(files))
