"""JSONL: a JSON object a line. What a line must hold is said by file and line where it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpshard.config import ConfigError
from mpshard.data.chat import ChatTemplate
from mpshard.data.tokenizers import Ids, Tokenizer
from mpshard.schema import show


class Document(NamedTuple):
    """Token ids (n,) and which of them are to be learnt, bool (n,)."""

    ids: Ids
    learn: npt.NDArray[np.bool_]


class Record(NamedTuple):
    """A line of a file: "FILE:LINE" for errors, its object, its size in bytes."""

    where: str
    content: dict[str, Any]
    bytes: int


def read_jsonl(path: str) -> Iterator[Record]:
    """The lines of a file, empty ones left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    content = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{where} is not JSON: {error}") from None
                if not isinstance(content, dict):
                    raise ConfigError(f"{where} is no JSON object")
                yield Record(where, content, len(line))


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """The string in a field of a record."""
    value = record.get(field)
    if not isinstance(value, str):
        problem = f"has no {field!r}, only {', '.join(record)}" if value is None else f"has no text in {field!r}: {show(str(value))}"
        raise ConfigError(f"{where} {problem}")
    return value


def prompt_completion(record: dict[str, Any], tokenizer: Tokenizer, where: str) -> Document:
    """``{"prompt": text, "completion": text}``: the completion and the separator behind it are to be learnt."""
    prompt, completion = text_of(record, "prompt", where), text_of(record, "completion", where)
    ids, learn = tokenizer.encode_spans(prompt + completion, [(len(prompt), len(prompt + completion))], special=True)
    if len(ids) and ids[-1] == tokenizer.separator:  # some tokenizers end a text themselves
        learn[-1] = True
        return Document(ids, learn)
    return Document(np.append(ids, np.asarray(tokenizer.separator, ids.dtype)), np.append(learn, True))


def chat(record: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate, where: str) -> Document:
    """``{"messages": [{"role": ..., "content": ...}, ...]}``: what the assistant says is to be learnt, its end included."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ConfigError(f"{where} has no 'messages': a list of objects with role and content")
    extra = {key: record[key] for key in ("tools", "documents") if key in record}
    text, spans = template.spans(messages, where, **extra)
    return Document(*tokenizer.encode_spans(text, spans, special=False))
