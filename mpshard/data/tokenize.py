"""Text to a file of token ids that training maps into memory: what `mpshard tokenize` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from mpshard.config import ConfigError
from mpshard.data.corpora import documents, find_files, id_type
from mpshard.data.tokenizers import Tokenizer


def tokenize(paths: Sequence[str], tokenizer: Tokenizer, out: str, field: str = "text",
             advance: Callable[[int], None] = lambda size: None) -> tuple[int, int]:
    """Write the ids of all documents, each with the separator behind it, to `out`; returns documents and tokens.

    The file is raw little-endian uint16, or uint32 for vocabularies above 2**16; it appears when it is complete.

    Parameters
    ----------
    paths : text files (one document each) and ``.jsonl`` files (one a line, its text in `field`).
    advance : called with the bytes of each document read.

    Raises
    ------
    ConfigError : a file that cannot be read or written, a line that is not what it should be.
    """
    kind = id_type(tokenizer.vocab_size).newbyteorder("<")
    separator = np.array([tokenizer.separator], kind).tobytes()
    n_documents = n_tokens = 0
    partial = f"{out}.partial"
    try:
        with open(partial, "wb") as file:
            for size, ids in documents(paths, tokenizer, field):
                if len(ids):
                    file.write(ids.astype(kind, copy=False).tobytes() + separator)
                    n_documents, n_tokens = n_documents + 1, n_tokens + len(ids) + 1
                advance(size)
        os.replace(partial, out)
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror}") from None
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    return n_documents, n_tokens


def files_of(sources: Sequence[str]) -> tuple[list[str], int]:
    """The files of paths and globs, and their bytes."""
    paths = [path for source in sources for path in find_files(source)]
    return paths, sum(os.path.getsize(path) for path in paths)
