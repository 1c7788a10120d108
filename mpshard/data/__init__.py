"""Corpora, tokenizers and batches: which tokens a rank sees is a pure function of (seed, position)."""

from __future__ import annotations

from typing import NamedTuple

from mpshard.config import Config
from mpshard.data.batches import Batch, Batches
from mpshard.data.corpora import open_tokens
from mpshard.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from mpshard.data.tokens import Tokens

__all__ = [
    "Batch", "Batches", "ByteTokenizer", "Data", "Tokenizer", "Tokens", "load_tokenizer", "open_data", "open_tokens",
]


class Data(NamedTuple):
    """What a configuration's ``[data]`` names, opened."""

    tokenizer: Tokenizer
    train: Batches
    eval: Batches | None


def open_data(config: Config) -> Data:
    """Open the training and evaluation data of a resolved configuration.

    Raises
    ------
    ConfigError : see `open_tokens`.
    """
    d = config.data
    tokenizer = load_tokenizer(d.tokenizer)

    def batches(sources: str | tuple[str, ...], name: str, held_out: bool) -> Batches:
        tokens = open_tokens(sources, tokenizer, config.model.vocab_size, d.token_dtype, held_out)
        return Batches(tokens, d.seq_len, config.train.seed, d.ignore_index, name)

    return Data(
        tokenizer,
        train=batches(d.train, "data.train", held_out=False),
        eval=None if d.eval == "none" else batches(d.eval, "data.eval", held_out=True),
    )
