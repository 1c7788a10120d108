"""Text to token ids and back."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpshard.config import ConfigError

Ids = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer.

    Attributes
    ----------
    vocab_size : ids are in [0, vocab_size).
    separator : the id that ends every document; also what generation from nothing starts with.
    """

    vocab_size: int
    separator: int

    def encode(self, text: str | bytes) -> Ids:
        """Token ids, shape (tokens,). No separator is added."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ids of shape (tokens,). What is no text becomes U+FFFD; never raises on ids of a model."""


class ByteTokenizer:
    """A token is a byte of UTF-8; byte 0, which text hardly ever holds, separates documents, so ids stay below 256."""

    vocab_size = 256
    separator = 0

    def encode(self, text: str | bytes) -> Ids:
        """The bytes, uint8. Lone surrogates (undecodable command-line arguments) give back the bytes they stand for."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text; an id of a padded vocabulary (256 or more) is no byte and becomes U+FFFD as invalid UTF-8 does."""
        ids = np.asarray(ids)
        return np.where((ids >= 0) & (ids < 256), ids, 0xFF).astype(np.uint8).tobytes().decode(errors="replace")


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of ``data.tokenizer``; `ConfigError` for one that does not exist."""
    if name == "bytes":
        return ByteTokenizer()
    raise ConfigError(f'data.tokenizer="{name}" is not supported; use "bytes"')
