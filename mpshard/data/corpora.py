"""Sources, as the configuration names them, to `Tokens`.

A source is ``stdlib`` (the running interpreter's own library), a path or a glob; ``.bin`` and ``.npy`` files hold token
ids, each line of a ``.jsonl`` file a document as its field "text", any other file is one document of text. A document
ends with the tokenizer's separator, the last one included, so sources join in any order; files of ids carry their own.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpshard.config import ConfigError
from mpshard.data.records import read_jsonl, text_of
from mpshard.data.tokenizers import ByteTokenizer, Ids, Tokenizer
from mpshard.data.tokens import Piece, Tokens, array_piece, bin_piece, npy_piece

_TEXTS = 1000  # encoded at a time, on all cores
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def open_tokens(
    sources: str | Sequence[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    token_dtype: str = "auto",
    held_out: bool = False,
) -> Tokens:
    """The tokens of one or several sources, in their order.

    Parameters
    ----------
    sources : ``stdlib``, a path, a glob, or a list of these. A glob's files come sorted by name.
    vocab_size : ids must be below it.
    token_dtype : of ``.bin`` files: uint16, uint32, or auto, which is uint16 where `vocab_size` fits.
    held_out : of ``stdlib``, the tenth kept for evaluation instead of the rest.

    Raises
    ------
    ConfigError : nothing there, unreadable, not what its name says, or ids outside the vocabulary.
    """
    pieces: list[Piece] = []
    for source in [sources] if isinstance(sources, str) else sources:
        paths = stdlib_files(held_out) if source == "stdlib" else find_files(source)
        for path in paths:
            try:
                pieces += _file_pieces(path, tokenizer, vocab_size, token_dtype)
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return Tokens(pieces, vocab_size)


def find_files(source: str) -> list[str]:
    """The files of a path or a glob (``**`` crosses directories), sorted; `ConfigError` if there are none."""
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        raise ConfigError(f"{source} is a directory; name its files, as {os.path.join(source, '*.txt')}")
    files = sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
    if not files:
        is_glob = glob.has_magic(path)
        raise ConfigError(f"no file matches {source}" if is_glob else f"no file {source}; paths start at {os.getcwd()}")
    return files


def stdlib_files(held_out: bool) -> list[str]:
    """The ``.py`` files of the running interpreter's standard library, without tests and installed packages, sorted.

    A file belongs to the held-out tenth by the hash of its path below the library, so it is the same tenth wherever
    the library lies, and other files coming or going move none.
    """
    root = sysconfig.get_paths()["stdlib"]
    names = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _NOT_LIBRARY]
        below = os.path.relpath(directory, root)
        names += [os.path.normpath(os.path.join(below, name)) for name in files if name.endswith(".py")]
    if not names:
        raise ConfigError(f'this Python has no library sources under {root}; data.train="stdlib" needs them')
    return [os.path.join(root, name) for name in sorted(names) if _in_held_out_tenth(name) == held_out]


def _in_held_out_tenth(name: str) -> bool:
    digest = hashlib.blake2b(name.replace(os.sep, "/").encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 10 == 0


def documents(paths: Iterable[str], tokenizer: Tokenizer, field: str = "text") -> Iterator[tuple[int, Ids]]:
    """(bytes read, token ids without the separator) of each document of text and JSONL files."""
    for path in paths:
        if path.endswith(".jsonl"):
            records = read_jsonl(path)
            while batch := list(itertools.islice(records, _TEXTS)):
                texts = [text_of(record.content, field, record.where) for record in batch]
                for record, ids in zip(batch, tokenizer.encode_many(texts), strict=True):
                    yield record.bytes, _without(ids, tokenizer.separator)
        else:
            with open(path, "rb") as file:
                data = file.read()
            yield len(data), _without(tokenizer.encode(data), tokenizer.separator)


def _without(ids: Ids, separator: int) -> Ids:
    """Some tokenizers end a text themselves."""
    return ids[:-1] if len(ids) and ids[-1] == separator else ids


def _file_pieces(path: str, tokenizer: Tokenizer, vocab_size: int, token_dtype: str) -> list[Piece]:
    if path.endswith(".bin"):
        return [bin_piece(path, id_type(vocab_size) if token_dtype == "auto" else token_dtype)]
    if path.endswith(".npy"):
        return [npy_piece(path)]
    if isinstance(tokenizer, ByteTokenizer) and not path.endswith(".jsonl"):  # the file is its own tokens: map it
        text = bin_piece(path, np.uint8)
        separator = array_piece("separator", np.array([tokenizer.separator], np.uint8))
        return [text, separator] if text.length else []
    separator_id = np.array([tokenizer.separator], id_type(tokenizer.vocab_size))
    parts = [part for _, ids in documents([path], tokenizer) for part in (ids, separator_id) if len(ids)]
    return [array_piece(path, np.concatenate(parts))] if parts else []


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The smaller of the two types of ``.bin`` files that holds all ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
