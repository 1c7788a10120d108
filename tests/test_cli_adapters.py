"""Fine-tuning with adapters from the command line: train, resume, evaluate, merge, all on other numbers of ranks."""

from __future__ import annotations

import json

import pytest

from tests.launch import launch

pytestmark = pytest.mark.mpi
BASE = ["model.n_layers=2", "model.d_model=16", "model.n_heads=2", "data.seq_len=16", "data.eval=none", "train.global_batch_size=4",
        "train.micro_batch_size=2"]
TUNED = ["data.seq_len=16", "data.eval=none", "train.global_batch_size=4", "train.micro_batch_size=2", "optim.lr=0.05",
         "lora.rank=2", "lora.targets=[\"c_attn\", \"mlp.c_fc\"]"]


def mpshard(ranks, *words):
    result = launch(ranks, ["-m", "mpshard", *map(str, words)], timeout=120)
    assert result.returncode == 0, result.report()
    return result.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (folder / "empty.toml").write_text("")
    data = f"data.train={folder / 'text.txt'}"
    mpshard(1, "train", folder / "empty.toml", data, *BASE, "train.steps=2", f"run.dir={folder / 'base'}")
    mpshard(2, "train", folder / "empty.toml", data, *TUNED, "train.steps=3", f"model.init_from={folder / 'base'}",
            f"run.dir={folder / 'tuned'}")
    return folder


def loss(ranks, folder, directory):
    found = mpshard(ranks, "eval", directory, "--data", folder / "text.txt", "data.seq_len=16", "train.eval_batches=20", "--json")
    return json.loads(found)["eval_loss"]


def test_a_run_of_adapters_is_a_model_for_eval_and_merge(runs):
    tuned = loss(2, runs, runs / "tuned")
    assert tuned < loss(2, runs, runs / "base") - 0.01
    mpshard(2, "merge", runs / "tuned", runs / "merged")
    assert (runs / "merged" / "model.safetensors").exists() and not list((runs / "merged").glob("adapter*"))
    assert loss(1, runs, runs / "merged") == pytest.approx(tuned, rel=1e-5)
    mpshard(1, "sample", runs / "tuned", "--prompt", "the ", "--tokens", "3")
    assert "adapters" not in mpshard(1, "inspect", runs / "tuned", "--verify")


def test_a_run_of_adapters_goes_on(runs):
    words = ["train", runs / "tuned" / "config.toml", f"run.dir={runs / 'tuned'}", "run.resume=auto", "train.steps=5"]
    assert "resumed from" in mpshard(1, *words)
    lines = [json.loads(line) for line in (runs / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("words", "expected"), [
    (["lora.rank=2"], "lora.rank=2 adapts a trained model: set model.init_from"),
    (["lora.alpha=2"], "lora.alpha=2.0 has no effect with lora.rank=0"),
    (["model.init_from={base}", "lora.rank=2", "optim.trainable=[\"*ln*\"]"], "adapters alone learn"),
    (["model.init_from={base}", "lora.rank=2", "lora.targets=[\"c_atn\"]"], "the nearest names are c_attn"),
    (["lora.init_from={tuned}", "lora.rank=3"], "lora.rank=3 contradicts lora.init_from="),
])
def test_what_cannot_be_is_refused_in_a_line(runs, words, expected):
    words = [word.format(base=runs / "base", tuned=runs / "tuned") for word in words]
    result = launch(2, ["-m", "mpshard", "train", str(runs / "empty.toml"), "data.seq_len=16", f"run.dir={runs / 'none'}", *words], 60)
    assert result.returncode == 2 and expected in result.stderr and result.stderr.strip().count("\n") == 0, result.report()
