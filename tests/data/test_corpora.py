"""Sources to tokens: files, globs, lists, and the standard library with its stable held-out tenth."""

import os
import sysconfig

import numpy as np
import pytest

from mpshard.config import ConfigError, load
from mpshard.data import ByteTokenizer, open_data, open_tokens
from mpshard.data.corpora import find_files, stdlib_files
from tests.unprivileged import unprivileged


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bee")
    (tmp_path / "a.txt").write_bytes(b"ay\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "sub" / "c.txt").write_bytes(b"see")
    np.array([7, 8, 300], "<u2").tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", np.array([9, 10], np.int32))
    return tmp_path


def read(sources, **options):
    tokens = open_tokens(sources, ByteTokenizer(), options.pop("vocab_size", 400), **options)
    return tokens.read([0], len(tokens))[0]


def text(ids):
    return bytes(ids.tolist())


def test_documents_end_with_the_separator(corpus):
    assert text(read("b.txt")) == b"bee\0"
    assert text(read("*.txt")) == b"ay\xff\0bee\0"
    assert text(read("**/*.txt")) == b"ay\xff\0bee\0see\0"
    assert text(read(("sub/c.txt", "b.*"))) == b"see\0bee\0"
    assert text(read(str(corpus / "b.txt"))) == b"bee\0"


def test_token_files_as_they_are_and_mixed(corpus):
    assert read("t.bin").tolist() == [7, 8, 300]
    assert read(["t.npy", "b.txt", "t.bin"]).tolist() == [9, 10, *b"bee\0", 7, 8, 300]


def test_type_of_bin_files_follows_the_vocabulary_or_the_key(corpus):
    ids = np.array([1, 70000], "<u4")
    ids.tofile(corpus / "wide.bin")
    assert read("wide.bin", vocab_size=70001).tolist() == [1, 70000]
    assert read("wide.bin", vocab_size=65536).tolist() == ids.view("<u2").tolist()
    with pytest.raises(ConfigError, match=r"wide\.bin has id 70000 at token 1, outside the vocabulary of 65536"):
        read("wide.bin", vocab_size=65536, token_dtype="uint32")


def test_a_name_with_glob_characters_is_a_file_first(corpus):
    (corpus / "[x].txt").write_bytes(b"x")
    assert find_files("[x].txt") == ["[x].txt"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("*.md", r"no file matches \*\.md"),
        ("nowhere.txt", r"no file nowhere\.txt; paths start at /"),
        ("sub", r"sub is a directory; name its files, as sub/\*\.txt"),
    ],
)
def test_nothing_there(corpus, source, message):
    with pytest.raises(ConfigError, match=message):
        read(source)


def test_unreadable_file(corpus):
    read("b.txt")
    (corpus / "b.txt").chmod(0)
    with unprivileged(corpus), pytest.raises(ConfigError, match=r"cannot read b\.txt: Permission denied"):
        read("b.txt")


def test_another_tokenizer_encodes_each_document(corpus):
    class Shift:
        vocab_size, separator = 300, 299

        def encode(self, text):
            return np.frombuffer(text, np.uint8).astype(np.int64) + 1

        def decode(self, ids):
            raise NotImplementedError

    tokens = open_tokens("b.txt", Shift(), 300)
    assert tokens.read([0], 4)[0].tolist() == [99, 102, 102, 299]


def test_stdlib_parts_are_disjoint_stable_and_a_tenth():
    train, held_out = stdlib_files(False), stdlib_files(True)
    assert not set(train) & set(held_out)
    assert train == sorted(train) and held_out == sorted(held_out)
    root = sysconfig.get_paths()["stdlib"]
    names = {os.path.relpath(path, root).replace(os.sep, "/") for path in train + held_out}
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]
    sizes = [sum(map(os.path.getsize, paths)) for paths in (train, held_out)]
    assert 0.05 < sizes[1] / sum(sizes) < 0.2
    # The hash of the path alone decides: recorded, for a run must find its held-out files again.
    assert {os.path.join(root, name) for name in ("argparse.py", "enum.py", "shutil.py")} <= set(held_out)
    assert {os.path.join(root, name) for name in ("json/decoder.py", "ast.py", "socket.py")} <= set(train)


def test_open_data_opens_what_the_configuration_names(corpus):
    data = open_data(load(None, ['data.train=["a.txt", "b.txt"]', "data.eval=sub/*", "data.seq_len=2"]))
    assert (data.train.n_samples, data.train.seq_len) == (3, 2)
    assert data.eval is not None and data.eval.n_eval_windows == 2
    assert open_data(load(None, ["data.train=a.txt", "data.seq_len=2"])).eval is None


def test_open_data_of_the_standard_library_maps_it():
    data = open_data(load(None))
    assert data.eval is not None and len(data.train.tokens) > 5 * len(data.eval.tokens) > 10**5
    assert not data.train.tokens._mapped  # nothing is read before the first batch
