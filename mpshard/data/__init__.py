"""Corpora, tokenizers and batches: which tokens a rank sees is a pure function of (seed, position)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from mpshard.config import Config
from mpshard.data.batches import Batch, Batches
from mpshard.data.chat import load_chat_template
from mpshard.data.corpora import find_files, open_tokens
from mpshard.data.packing import PackedBatches
from mpshard.data.records import Document, chat, prompt_completion, read_jsonl
from mpshard.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from mpshard.data.tokens import Tokens
from mpshard.families import tokenizer_file

__all__ = [
    "Batch", "Batches", "ByteTokenizer", "Data", "PackedBatches", "Tokenizer", "Tokens", "load_chat_template", "load_tokenizer",
    "open_batches", "open_data", "open_tokens",
]


class Data(NamedTuple):
    """What a configuration's ``[data]`` names, opened."""

    tokenizer: Tokenizer
    train: Batches | PackedBatches
    eval: Batches | PackedBatches | None


def open_data(config: Config) -> Data:
    """Open the training and evaluation data of a resolved configuration.

    Raises
    ------
    ConfigError : see `open_tokens` and `PackedBatches`.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    evaluation = None if config.data.eval == "none" else open_batches(config, tokenizer, "eval")
    return Data(tokenizer, open_batches(config, tokenizer, "train"), evaluation)


def open_batches(config: Config, tokenizer: Tokenizer, which: str) -> Batches | PackedBatches:
    """The data of ``data.train`` or ``data.eval``; `which` is "train" or "eval"."""
    d, name = config.data, f"data.{which}"
    seed = config.train.seed if d.shuffle else None
    sources = d.train if which == "train" else d.eval
    if d.format == "text":
        tokens = open_tokens(sources, tokenizer, config.model.vocab_size, d.token_dtype, held_out=which == "eval")
        return Batches(tokens, d.seq_len, seed, d.ignore_index, name)
    documents = _documents(config, tokenizer, [sources] if isinstance(sources, str) else list(sources))
    return PackedBatches(documents, d.seq_len, config.model.vocab_size, seed, d.ignore_index, name)


def _documents(config: Config, tokenizer: Tokenizer, sources: list[str]) -> Iterator[Document]:
    """The records of JSONL files, in order."""
    d = config.data
    if d.format == "chat":
        directory = os.path.dirname(tokenizer_file(d.tokenizer)) if d.tokenizer != "bytes" else ""
        template = load_chat_template(directory, tokenizer, d.chat_template)
    for source in sources:
        for path in find_files(source):
            for where, record, _ in read_jsonl(path):
                yield (chat(record, tokenizer, template, where) if d.format == "chat"
                       else prompt_completion(record, tokenizer, where))
