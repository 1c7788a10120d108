"""A model trained, sampled from, evaluated, fine-tuned on conversations: the commands as a user strings them together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.launch import ROOT, Result, launch

pytestmark = pytest.mark.mpi

TINY = """
[model]
arch = "qwen3"
n_layers = 1
d_model = 32
n_heads = 2
head_dim = 8
max_seq_len = 64
[data]
train = "text.txt"
eval = "text.txt"
seq_len = 16
[train]
steps = 30
global_batch_size = 8
micro_batch_size = 2
[optim]
lr = 2e-2
"""
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CHATS = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes" * (1 + n % 3)}]} for n in range(40)]


def mpshard(n: int, folder: Path, *args: str) -> Result:
    return launch(n, ["-m", "mpshard", *args], timeout=120, cwd=folder)


def said(result: Result) -> dict:
    assert result.returncode == 0, result.report()
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a trained model in runs/tiny."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "text.txt").write_text("All happy families are alike. " * 100)
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    result = mpshard(2, folder, "train", "tiny.toml")
    assert result.returncode == 0, result.report()
    return folder


def test_sample_is_the_same_on_every_number_of_ranks(folder: Path) -> None:
    args = ("sample", "runs/tiny", "--prompt", "All happy", "--tokens", "12", "--json")
    greedy = [said(mpshard(n, folder, *args)) for n in (1, 3)]
    assert greedy[0] == greedy[1] and greedy[0]["prompt_tokens"] == 9
    assert len(greedy[0]["tokens"]) == 12 and greedy[0]["text"] == bytes(greedy[0]["tokens"]).decode(errors="replace")
    warm = said(mpshard(2, folder, *args, "--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--seed", "3"))
    assert warm != greedy[0]
    plain = mpshard(1, folder, *args[:-1])
    assert plain.stdout == "All happy" + greedy[0]["text"] + "\n"


def test_evaluation_is_that_of_training_on_every_number_of_ranks(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    for n in (1, 3):
        found = said(mpshard(n, folder, "eval", "runs/tiny", "--data", "text.txt", "data.seq_len=16", "--json"))
        assert found["tokens"] == 3000  # 3001 with the separator
        np.testing.assert_allclose(found["eval_loss"], lines[-1]["eval_loss"], rtol=1e-5)
    # Without data.seq_len: windows as long as the model can take.
    assert said(mpshard(1, folder, "eval", "runs/tiny", "--json", "--data", "text.txt"))["tokens"] == 3000


def test_fine_tuning_on_conversations(folder: Path) -> None:
    chat = ["data.format=chat", "data.chat_template=template.jinja"]
    result = mpshard(2, folder, "train", "tiny.toml", "model.init_from=runs/tiny", "run.dir=runs/chat", *chat,
                     "data.train=chats.jsonl", "data.eval=chats.jsonl", "data.seq_len=64")
    assert result.returncode == 0, result.report()
    assert "data.train: 40 documents in " in result.stdout
    first, *_ = (json.loads(line) for line in (folder / "runs" / "chat" / "metrics.jsonl").read_text().splitlines())
    found = [said(mpshard(n, folder, "eval", "runs/chat", "--json", *chat, "--data", "chats.jsonl")) for n in (1, 2)]
    assert found[0]["tokens"] == sum(len(c["messages"][1]["content"]) + 1 for c in CHATS)
    assert found[0]["eval_loss"] < 0.5 < first["loss"]
    np.testing.assert_allclose(found[0]["eval_loss"], found[1]["eval_loss"], rtol=1e-5)
    answer = said(mpshard(1, folder, "sample", "runs/chat", "--chat", "--prompt", "6?", "--tokens", "3", "--json", *chat[1:]))
    assert answer["text"] == "yes" and answer["prompt_tokens"] == len("<user>6?\n<assistant>")


def test_tokenize_then_train(folder: Path) -> None:
    checkpoint = "runs/tiny/checkpoints/step-00000030"
    found = said(mpshard(2, folder, "tokenize", "text.txt", "--tokenizer", checkpoint, "--out", "t.bin", "--json"))
    assert found == {"documents": 1, "tokens": 3001, "file": "t.bin"}
    np.testing.assert_array_equal(np.fromfile(folder / "t.bin", "<u2")[:-1], list((folder / "text.txt").read_bytes()))


@pytest.mark.parametrize(("args", "words"), [
    (("sample", "runs/none"), "no file runs/none/config.json"),
    (("sample", "runs/tiny", "--tokens", "-1"), "--tokens=-1 must be 0 or more"),
    (("sample", "runs/tiny", "--top-p", "0"), "top_p=0.0 must be above 0 and at most 1"),
    (("sample", "runs/tiny", "--system", "x"), "--system has no effect without --chat"),
    (("sample", "runs/tiny", "--chat"), "has no chat template"),
    (("sample", str(ROOT / "tests/golden/families/qwen3"), "--prompt", "z", "data.tokenizer=bytes"), "bytes has id 122, outside"),
    (("eval", "runs/tiny", "--data", "none.txt"), "no file none.txt"),
    (("eval", "runs/tiny", "--data", "text.txt", "data.seq_len=65"), "data.seq_len=65 is over model.max_seq_len=64"),
    (("eval", "runs/tiny", "--data", "text.txt", "model.d_model=33"), "model.d_model=33 contradicts model.init_from="),
    (("train", "tiny.toml", "model.init_from=/nowhere"), "no file /nowhere/config.json"),
    (("tokenize", "text.txt", "--tokenizer", "bytes", "--out", "t.txt"), "--out=t.txt must end with .bin"),
])
def test_what_cannot_be_is_one_line_and_status_2(folder: Path, args: tuple[str, ...], words: str) -> None:
    result = mpshard(2, folder, *args)
    assert result.returncode == 2 and not result.stdout.strip("\n"), result.report()
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("mpshard: "))  # Open MPI adds its own
    assert words in line and "Traceback" not in result.stderr
