"""Chat templates: messages to the text that a model was taught to read, and where in it the assistant speaks.

Templates are rendered as `transformers` does (utils/chat_template_utils.py, version 5.24): jinja2 in its immutable
sandbox, blocks trimmed, with loop controls, `raise_exception`, `strftime_now` and the `generation` tag.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from mpshard.config import ConfigError
from mpshard.families import read_json

if TYPE_CHECKING:
    from mpshard.data.tokenizers import Span, Tokenizer

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Around what a template's generation tag encloses; noncharacters, which no text may hold (Unicode, section 23.7).
_BEGIN, _END = "\ufdd0", "\ufdd1"


class ChatTemplate:
    """A template's source and the special tokens that it may name. `where` it comes from, for errors."""

    def __init__(self, source: str, special: dict[str, str], where: str) -> None:
        try:
            import jinja2
            import jinja2.ext
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ConfigError(f'{where} needs the package jinja2: pip install "mpshard[hf]"') from None

        class Generation(jinja2.ext.Extension):
            tags = {"generation"}

            def parse(self, parser: Any) -> list[Any]:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

                def mark(text: str) -> Any:
                    return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)]).set_lineno(line)

                return [mark(_BEGIN), *body, mark(_END)]

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": raise_exception,
                                "strftime_now": lambda form: datetime.now().strftime(form)}
        self.where, self.special = where, special
        self._problems = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{where} is no chat template: {error}") from None

    def render(self, messages: Sequence[Message], where: str = "the conversation", *, prompt: bool = False, **extra: Any) -> str:
        """The text of messages; `prompt`: with the beginning of the assistant's next one. `where` they are, for errors."""
        return self._render(messages, where, prompt, extra).replace(_BEGIN, "").replace(_END, "")

    def spans(self, messages: Sequence[Message], where: str, **extra: Any) -> tuple[str, list[Span]]:
        """The text of messages, and the characters [start, stop) in it that the assistant says.

        A template's generation tags say which. One without is asked for the text before and after each message of the
        assistant, which must be beginnings of the whole; if it rewrites earlier messages this cannot be, and is refused.
        """
        marked = self._render(messages, where, False, extra)
        if _BEGIN in marked:
            return _unmark(marked)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], where, prompt=True, **extra)
                after = self.render(messages[: i + 1], where, **extra)
                if not (marked.startswith(after) and after.startswith(before)):
                    raise ConfigError(f"{where}: {self.where} writes message {i + 1} otherwise when more follow, so what "
                                      "the assistant says in it cannot be found; split the conversation there")
                spans.append((len(before), len(after)))
        return marked, spans

    def _render(self, messages: Sequence[Message], where: str, prompt: bool, extra: dict[str, Any]) -> str:
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=prompt, **{"tools": None, "documents": None, **self.special, **extra})
        except self._problems as error:
            raise ConfigError(f"{where}: {self.where} refuses it: {error}") from None
        return text


def _unmark(marked: str) -> tuple[str, list[Span]]:
    text, spans = "", []
    for part in marked.split(_BEGIN):
        said, end, rest = part.partition(_END)
        if end:
            spans.append((len(text), len(text) + len(said)))
        text += said + rest
    return text, spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """jinja2's own filter escapes what HTML would need escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def load_chat_template(directory: str, tokenizer: Tokenizer, file: str = "auto") -> ChatTemplate:
    """The chat template in `file`; "chatml": `CHATML`; "auto": that of a model's or a tokenizer's directory."""
    if file == "chatml":
        return ChatTemplate(CHATML, tokenizer.special, "chatml")
    path = os.path.join(directory, "chat_template.jinja") if file == "auto" else file
    try:
        with open(path, encoding="utf-8") as opened:
            return ChatTemplate(opened.read(), tokenizer.special, path)
    except FileNotFoundError:
        if file != "auto":
            raise ConfigError(f"no chat template {file}; is the path right?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    path = os.path.join(directory, "tokenizer_config.json")
    source = read_json(path).get("chat_template") if os.path.exists(path) else None
    if isinstance(source, list):  # several by name, as older versions wrote them
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(f"{directory or 'the tokenizer'} has no chat template, neither chat_template.jinja nor in "
                          "tokenizer_config.json; name one: data.chat_template=FILE, or chatml for <|im_start|>ROLE ... <|im_end|>")
    return ChatTemplate(source, tokenizer.special, path)
