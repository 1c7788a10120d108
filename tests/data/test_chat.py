"""Chat templates and tokenizer files against what transformers makes of them (`tests/golden/make_chat.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpshard import config as cfg
from mpshard.config import ConfigError
from mpshard.data import ByteTokenizer, load_chat_template, load_tokenizer, open_batches
from mpshard.data.chat import ChatTemplate
from mpshard.data.records import chat, prompt_completion

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

GOLDEN = Path(__file__).parent.parent / "golden" / "chat"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(GOLDEN))


def template(name, tokenizer):
    return ChatTemplate(EXPECTED["templates"][name], tokenizer.special, "the template")


@pytest.mark.parametrize("made", EXPECTED["made"], ids=lambda made: f"{made['template']}-{made['conversation']}")
def test_rendered_as_transformers_does(tokenizer, made):
    messages, extra = EXPECTED["conversations"][made["conversation"]], {"tools": TOOLS} if made["template"] == "tools" else {}
    renderer = template(made["template"], tokenizer)
    for prompt in (False, True):
        assert renderer.render(messages, prompt=prompt, **extra) == made[f"text{prompt:d}"]
    if made["template"] == "tools":  # its end moves, so nothing can be said of earlier messages
        with pytest.raises(ConfigError, match="file:1: the template writes message . otherwise when more follow"):
            chat({"messages": messages, **extra}, tokenizer, renderer, "file:1")
        return
    document = chat({"messages": messages}, tokenizer, renderer, "file:1")
    assert document.ids.tolist() == made["ids"]
    if made["mask"]:
        assert document.learn.astype(int).tolist() == made["mask"]


def test_without_generation_tags_the_assistant_is_found(tokenizer):
    document = chat({"messages": EXPECTED["conversations"][1]}, tokenizer, template("chatml", tokenizer), "file:1")
    ends = np.flatnonzero(np.diff(document.learn.astype(int), prepend=0, append=0)).reshape(-1, 2)
    said = [tokenizer._tokenizer.decode(document.ids[start:stop].tolist(), skip_special_tokens=False) for start, stop in ends]
    assert said == ["héllo<|im_end|>\n", "<|im_end|>\n"]


@pytest.mark.parametrize("plain", EXPECTED["plain"], ids=lambda plain: plain["text"])
def test_encoded_and_decoded_as_transformers_does(tokenizer, plain):
    ids = tokenizer.encode(plain["text"])
    assert ids.tolist() == plain["ids"] and ids.dtype == np.uint16
    assert tokenizer.decode(ids) == plain["decoded"]
    assert tokenizer.encode_many([plain["text"]])[0].tolist() == plain["ids"]


def test_a_tokenizer_directory(tokenizer, tmp_path):
    assert (tokenizer.vocab_size, tokenizer.separator, tokenizer.special) == (600, 2, {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    assert set(tokenizer.files()) == {"tokenizer.json", "tokenizer_config.json"}
    assert tokenizer.decode([600, 2**40, -1]) == ""  # of a padded vocabulary
    assert tokenizer.encode("a\udc80") is not None
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).separator == 0  # alone: <|endoftext|>, known by name
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 0], "bos_token_id": 3}')
    beside = load_tokenizer(str(tmp_path))
    assert beside.separator == 2 and beside.special_ids == {"eos_token_id": [2, 0], "bos_token_id": 3}
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_bytes_as_a_tokenizer_file(tmp_path):
    """What a checkpoint of a byte-level model carries is the same tokenizer to the package, and to us."""
    from tokenizers import Tokenizer

    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().files()["tokenizer.json"])
    text = "héllo \x00🙂\n  x" + "".join(map(chr, range(1, 256)))
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(text).ids == list(text.encode()) and theirs.decode(theirs.encode(text).ids) == text
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_completion_and_its_end_are_learnt(tokenizer, kind):
    tokenizer = ByteTokenizer() if kind == "bytes" else tokenizer
    document = prompt_completion({"prompt": "Grüße, ", "completion": "Rank 🙂"}, tokenizer, "file:1")
    assert document.ids[-1] == tokenizer.separator and document.learn[-1]
    assert tokenizer.decode(document.ids[document.learn][:-1]) == "Rank 🙂"
    assert tokenizer.decode(document.ids[~document.learn]) == "Grüße, "


def test_a_token_of_both_prompt_and_completion_is_learnt(tokenizer):
    document = prompt_completion({"prompt": "the ra", "completion": "nk is"}, tokenizer, "file:1")
    assert [tokenizer.decode(document.ids[part]) for part in (~document.learn, document.learn)] == ["the", " rank is"]


@pytest.mark.parametrize(("line", "words"), [
    ("{", ":1 is not JSON"),
    ("[1]", ":1 is no JSON object"),
    ('{"text": "x"}', ":1 has no 'messages'"),
    ('{"messages": []}', ":1 has no 'messages'"),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', "refuses it: only text"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "data.train has nothing to learn in 1 documents"),
])
def test_a_wrong_line_is_refused_by_name(tmp_path, line, words):
    (tmp_path / "chats.jsonl").write_text(line + "\n")
    (tmp_path / "template.jinja").write_text(EXPECTED["templates"]["generation"])
    config = cfg.load(None, ["data.format=chat", f"data.train={tmp_path}/chats.jsonl", f"data.tokenizer={GOLDEN}",
                             f"data.chat_template={tmp_path}/template.jinja"])
    with pytest.raises(ConfigError) as caught:
        open_batches(config, load_tokenizer(config.data.tokenizer), "train")
    assert words in str(caught.value)


def test_where_the_template_comes_from(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="has no chat template"):
        load_chat_template(str(GOLDEN), tokenizer)
    with pytest.raises(ConfigError, match="no chat template /nowhere"):
        load_chat_template(str(GOLDEN), tokenizer, "/nowhere")
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(str(tmp_path), tokenizer).render([]) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(str(tmp_path), tokenizer).render([]) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="is no chat template"):
        load_chat_template(str(tmp_path), tokenizer)


def test_chatml_is_built_in(tokenizer):
    made = next(made for made in EXPECTED["made"] if (made["template"], made["conversation"]) == ("chatml", 1))  # has a system message
    assert load_chat_template("", tokenizer, "chatml").render(EXPECTED["conversations"][1], prompt=True) == made["text1"]


def test_a_template_cannot_reach_python(tokenizer):
    with pytest.raises(ConfigError, match="refuses it"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}, "the template").render([])
