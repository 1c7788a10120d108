"""Bytes to ids and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.config import ConfigError
from mpshard.data.tokenizers import ByteTokenizer, load_tokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_round_trips(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_what_is_no_text_becomes_the_replacement_character():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 0xFF, 105]) == "h\ufffdi"
    assert tokenizer.decode(np.array([104, 256, 300, 105])) == "h\ufffd\ufffdi"
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("a\udc80").tolist() == [97, 0x80]


def test_no_such_tokenizer() -> None:
    assert load_tokenizer("bytes").vocab_size == 256
    with pytest.raises(ConfigError, match='data.tokenizer="gpt2" is neither "bytes" nor a tokenizer.json'):
        load_tokenizer("gpt2")
