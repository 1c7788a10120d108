"""Sources, as the configuration names them, to `Tokens`.

A source is ``stdlib`` (the running interpreter's own library), a path or a glob; ``.bin`` and ``.npy`` files hold token
ids, any other file is one document of text. A document ends with the tokenizer's separator, the last one included, so
sources join in any order; files of ids carry their own.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence

import numpy as np

from mpshard.config import ConfigError
from mpshard.data.tokenizers import ByteTokenizer, Tokenizer
from mpshard.data.tokens import Piece, Tokens, array_piece, bin_piece, npy_piece

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


def _file_pieces(path: str, tokenizer: Tokenizer, vocab_size: int, token_dtype: str) -> list[Piece]:
    if path.endswith(".bin"):
        if token_dtype == "auto":
            token_dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        return [bin_piece(path, token_dtype)]
    if path.endswith(".npy"):
        return [npy_piece(path)]
    if isinstance(tokenizer, ByteTokenizer):  # the file is its own tokens: map it
        text = bin_piece(path, np.uint8)
    else:
        with open(path, "rb") as file:
            text = array_piece(path, tokenizer.encode(file.read()))
    separator = array_piece("separator", np.array([tokenizer.separator], np.min_scalar_type(tokenizer.separator)))
    return [text, separator] if text.length else []
