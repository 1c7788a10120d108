"""Text to token ids and back."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpshard.config import ConfigError
from mpshard.families import read_json, tokenizer_file

Ids = npt.NDArray[np.integer[Any]]
Span = tuple[int, int]  # characters [start, stop) of a text


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer.

    Attributes
    ----------
    vocab_size : ids are in [0, vocab_size).
    separator : the id that ends every document; also what generation from nothing starts with.
    special : texts of the special tokens that chat templates name, as ``{"eos_token": "</s>"}``.
    special_ids : what config.json says of them, as ``{"eos_token_id": 2}``, an id or a list of ids.
    """

    vocab_size: int
    separator: int
    special: dict[str, str]
    special_ids: dict[str, Any]

    def encode(self, text: str | bytes, special: bool = True) -> Ids:
        """Token ids, shape (tokens,). `special`: with what the tokenizer puts around a text (a first token, say)."""

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each."""

    def encode_spans(self, text: str, spans: Sequence[Span], special: bool) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """As `encode`, and which tokens hold a character of one of the spans."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ids of shape (tokens,). What is no text becomes U+FFFD; never raises on ids of a model."""

    def files(self) -> dict[str, bytes]:
        """What to put beside a model's weights so that it is found again: file names and their contents."""


class ByteTokenizer:
    """A token is a byte of UTF-8; byte 0, which text hardly ever holds, separates documents, so ids stay below 256."""

    vocab_size = 256
    separator = 0
    special: dict[str, str] = {}
    special_ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}

    def encode(self, text: str | bytes, special: bool = True) -> Ids:
        """The bytes, uint8. Lone surrogates (undecodable command-line arguments) give back the bytes they stand for."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str, spans: Sequence[Span], special: bool) -> tuple[Ids, npt.NDArray[np.bool_]]:
        ids = self.encode(text)
        inside = np.zeros(len(ids), bool)
        for start, stop in spans:
            first = len(self.encode(text[:start]))
            inside[first : first + len(self.encode(text[start:stop]))] = True
        return ids, inside

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text; an id of a padded vocabulary (256 or more) is no byte and becomes U+FFFD as invalid UTF-8 does."""
        ids = np.asarray(ids)
        return np.where((ids >= 0) & (ids < 256), ids, 0xFF).astype(np.uint8).tobytes().decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """A tokenizer.json that does the same in `tokenizers`: byte-pair encoding without pairs."""
        content: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {character: byte for byte, character in enumerate(_byte_characters())}, "merges": []},
        }  # fmt: skip
        return {"tokenizer.json": (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()}


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it prints, else one from 256 on.

    Radford et al. 2019, bytes_to_unicode of GPT-2's encoder.py.
    """
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of ``data.tokenizer``: "bytes", a tokenizer.json or its directory; `ConfigError` if there is none."""
    if name == "bytes":
        return ByteTokenizer()
    path = tokenizer_file(name)
    if not os.path.exists(path):
        raise ConfigError(f'data.tokenizer="{name}" is neither "bytes" nor a tokenizer.json nor a directory with one')
    own = ByteTokenizer().files()["tokenizer.json"]
    if os.path.getsize(path) == len(own) and read_json(path) == json.loads(own):  # one of our checkpoints
        return ByteTokenizer()
    from mpshard.data.file_tokenizer import FileTokenizer

    return FileTokenizer(path)
