"""A tokenizer.json, by the package `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpshard.config import ConfigError
from mpshard.data.tokenizers import Ids, Span
from mpshard.families import read_json

# The token that ends a text in the vocabularies of known families, for a tokenizer.json without its companions.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<|eot_id|>", "<eos>", "[SEP]")
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


class FileTokenizer:
    """See `mpshard.data.tokenizers.Tokenizer`. `path` is that of the tokenizer.json.

    Which token ends a document: eos_token of tokenizer_config.json, else (the first) eos_token_id of config.json, both
    beside the file, else a well-known one of the vocabulary.
    """

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Implementation
        except ImportError:
            raise ConfigError(f'{path} needs the package tokenizers: pip install "mpshard[hf]"') from None
        try:
            self._tokenizer = Implementation.from_file(path)
        except Exception as error:  # the package raises nothing narrower
            raise ConfigError(f"{path} is no tokenizer.json: {error}") from None
        self.path, self.directory = path, os.path.dirname(path)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.special = self._special_tokens()
        content = self._companion("config.json")
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        self.special_ids: dict[str, Any] = {name: content[name] for name in names if name in content}
        self.separator = self._separator()
        self.special_ids.setdefault("eos_token_id", self.separator)

    def encode(self, text: str | bytes, special: bool = True) -> Ids:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._ids(self._tokenizer.encode(_clean(text), add_special_tokens=special))

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each, on all cores."""
        return [self._ids(encoding) for encoding in self._tokenizer.encode_batch([_clean(text) for text in texts])]

    def encode_spans(self, text: str, spans: Sequence[Span], special: bool) -> tuple[Ids, npt.NDArray[np.bool_]]:
        encoding = self._tokenizer.encode(_clean(text), add_special_tokens=special)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)  # in characters; (0, 0) for what was put around
        inside = np.zeros(len(offsets), bool)
        for start, stop in spans:
            inside |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        return self._ids(encoding), inside

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text without special tokens; an id outside the vocabulary is no text."""
        known = [i for i in np.asarray(ids).tolist() if 0 <= i < self.vocab_size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text

    def files(self) -> dict[str, bytes]:
        """tokenizer.json and the files beside it that belong to it."""
        found = {}
        for name in ("tokenizer.json", *_COMPANIONS):
            path = self.path if name == "tokenizer.json" else os.path.join(self.directory, name)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    found[name] = file.read()
        return found

    def _ids(self, encoding: Any) -> Ids:
        return np.array(encoding.ids, np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def _companion(self, name: str) -> dict[str, Any]:
        path = os.path.join(self.directory, name)
        return read_json(path) if os.path.exists(path) else {}

    def _special_tokens(self) -> dict[str, str]:
        """``{"eos_token": text, ...}`` of tokenizer_config.json, where a token is a text or an object with its content."""
        found = {}
        for name, token in self._companion("tokenizer_config.json").items():
            if name.endswith("_token"):
                text = token.get("content") if isinstance(token, dict) else token
                if isinstance(text, str):
                    found[name] = text
        return found

    def _separator(self) -> int:
        ids = self.special_ids.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        for token in (self.special.get("eos_token"), first, *_ENDS):
            found = self._tokenizer.token_to_id(token) if isinstance(token, str) else token
            if type(found) is int and 0 <= found < self.vocab_size:
                return found
        raise ConfigError(f"{self.path} has no token that ends a text; name it as eos_token in a tokenizer_config.json beside it")


def _clean(text: str) -> str:
    """Lone surrogates (undecodable arguments) as U+FFFD: `tokenizers` takes no others."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text
