"""The real SmolLM2-135M-Instruct: the same continuation, loss, training and weights as transformers and FSDP2.

    MPSHARD_SMOLLM2=DIR python -m pytest -m slow tests/test_smollm2.py

DIR is its Hugging Face directory in float32 (config.json, model.safetensors, tokenizer.json). What is expected comes from
`tests/golden/make_smollm2.py`. With MPSHARD_PEER_PYTHON=PYTHON, a Python that has torch and transformers, the checkpoint is
opened there as well. Five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.launch import ROOT, launch

DIRECTORY = os.environ.get("MPSHARD_SMOLLM2", "")
PEER = os.environ.get("MPSHARD_PEER_PYTHON", "")
GOLDEN = Path(__file__).parent / "golden" / "smollm2.npz"

pytestmark = [pytest.mark.slow, pytest.mark.mpi,
              pytest.mark.skipif(not DIRECTORY, reason="MPSHARD_SMOLLM2 names no directory of the model")]


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


def mpshard(n: int, *args: str | Path) -> str:
    result = launch(n, ["-m", "mpshard", *map(str, args)], timeout=600)
    assert result.returncode == 0, result.report()
    return result.stdout


@pytest.mark.parametrize("n", [1, 2])
def test_continues_as_transformers_does(golden, n):
    said = json.loads(mpshard(n, "sample", DIRECTORY, "--prompt", golden["prompt"].item(), "--tokens", "20", "--json"))
    assert said["tokens"] == golden["continuation"].tolist()
    assert said["text"].startswith(" Paris")


def test_the_loss_is_that_of_transformers(golden, tmp_path):
    np.save(tmp_path / "tokens.npy", golden["evaluation"])
    said = json.loads(mpshard(2, "eval", DIRECTORY, "--data", tmp_path / "tokens.npy", f"data.seq_len={golden['seq']}", "--json"))
    assert said["tokens"] == len(golden["evaluation"]) - 1
    assert abs(said["eval_loss"] - golden["eval_loss"]) < 1e-4


LOGITS = """
import sys, numpy as np
{load}
ids = np.load(sys.argv[2]).astype(np.int64)[None, :64]
np.save(sys.argv[3], {logits})
"""
OURS = LOGITS.format(load="from mpshard.checkpoint import load_model; model = load_model(sys.argv[1])", logits="model.logits(ids)")
THEIRS = LOGITS.format(
    load="import torch, transformers; model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)",
    logits="model(torch.from_numpy(ids)).logits.detach().numpy()")


@pytest.fixture(scope="module")
def finetuned(golden, tmp_path_factory):
    """The run directory after ten steps; beside it tokens.npy, what it was trained on."""
    folder = tmp_path_factory.mktemp("finetuned")
    np.save(folder / "tokens.npy", golden["train"])
    mpshard(2, "train", ROOT / "examples" / "finetune_smollm2.toml", f"model.init_from={DIRECTORY}",
            f"data.train={folder}/tokens.npy", f"run.dir={folder}/run")
    return folder / "run"


def test_ten_steps_follow_fsdp2(golden, finetuned):
    lines = [json.loads(line) for line in (finetuned / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["loss"] for line in lines if "loss" in line], golden["losses"], rtol=1e-3)
    np.testing.assert_allclose([line["grad_norm"] for line in lines if "loss" in line], golden["grad_norms"], rtol=1e-3)


def test_the_tokenizer_goes_with_the_checkpoint(finetuned):
    assert (finetuned / "checkpoints/step-00000010/tokenizer.json").read_bytes() == (Path(DIRECTORY) / "tokenizer.json").read_bytes()


@pytest.mark.skipif(not PEER, reason="MPSHARD_PEER_PYTHON names no Python with torch and transformers")
def test_the_checkpoint_opens_in_transformers(finetuned, tmp_path):
    checkpoint, tokens = finetuned / "checkpoints" / "step-00000010", finetuned.parent / "tokens.npy"
    ours = launch(1, ["-c", OURS, checkpoint, tokens, tmp_path / "ours.npy"], timeout=300)
    assert ours.returncode == 0, ours.report()
    subprocess.run([PEER, "-c", THEIRS, checkpoint, tokens, tmp_path / "theirs.npy"], check=True, timeout=300)
    theirs = np.load(tmp_path / "theirs.npy")
    np.testing.assert_allclose(np.load(tmp_path / "ours.npy"), theirs, atol=1e-5 * np.abs(theirs).max())
