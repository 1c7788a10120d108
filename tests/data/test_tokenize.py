"""`tokenize`: what training maps back is the documents, each with a separator behind it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpshard.config import ConfigError
from mpshard.data import ByteTokenizer, open_tokens
from mpshard.data.tokenize import files_of, tokenize


class Wide:
    """Bytes, in a vocabulary that needs uint32."""

    vocab_size = 100_000
    separator = 99_999

    def encode(self, text, special=True):
        return ByteTokenizer().encode(text).astype(np.uint32)

    def encode_many(self, texts):
        return [self.encode(text) for text in texts]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Wide()], ids=["uint16", "uint32"])
def test_a_file_of_ids(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("first\n")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": text, "other": 1}) for text in ("zwei ü", "", "three")))
    paths, size = files_of([str(tmp_path / "*.txt"), str(tmp_path / "b.jsonl")])
    read = []
    assert tokenize(paths, tokenizer, str(tmp_path / "out.bin"), advance=read.append) == (3, 6 + 7 + 5 + 3)
    assert sum(read) == size == (tmp_path / "a.txt").stat().st_size + (tmp_path / "b.jsonl").stat().st_size
    tokens = open_tokens(str(tmp_path / "out.bin"), tokenizer, tokenizer.vocab_size)
    ids = tokens.read([0], len(tokens))[0]
    assert tokens._pieces[0].dtype.itemsize == (2 if tokenizer.vocab_size == 256 else 4)
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.separator) + 1)[:-1]
    assert [bytes(part[:-1].astype(np.uint8)).decode() for part in parts] == ["first\n", "zwei ü", "three"]
    # and the same without the detour
    direct = open_tokens(paths, tokenizer, tokenizer.vocab_size)
    np.testing.assert_array_equal(direct.read([0], len(direct))[0], ids)


def test_nothing_is_left_of_a_failure(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    with pytest.raises(ConfigError, match=r"b.jsonl:2 has no 'text', only txt"):
        tokenize([str(tmp_path / "b.jsonl")], ByteTokenizer(), str(tmp_path / "out.bin"))
    assert [path.name for path in tmp_path.iterdir()] == ["b.jsonl"]
    with pytest.raises(ConfigError, match="No such file or directory"):
        tokenize([str(tmp_path / "b.jsonl")], ByteTokenizer(), str(tmp_path / "no" / "out.bin"))
