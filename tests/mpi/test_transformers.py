"""A checkpoint that several ranks wrote opens in `transformers` as it is, and gives the same logits.

Needs torch and transformers, in this interpreter or in the one that MPSHARD_TEST_TORCH names:
    MPSHARD_TEST_TORCH=~/torch/bin/python python -m pytest -m slow tests/mpi/test_transformers.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import clean_env, launch

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

OURS = """
import sys
import numpy as np
from mpshard.checkpoint import load_model
from mpshard.comm import world
logits = load_model(sys.argv[1]).logits(np.arange(24).reshape(2, 12) % 256)
if world.rank == 0:
    np.save(sys.argv[2], logits)
"""
THEIRS = """
import sys
import numpy as np
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
with torch.no_grad():
    theirs = model(torch.arange(24).reshape(2, 12) % 256).logits.numpy()
print(type(model).__name__, sum(p.numel() for p in model.parameters()), np.abs(theirs - np.load(sys.argv[2])).max(), np.abs(theirs).max())
"""
MODELS = {
    "gpt2": ("GPT2LMHeadModel", ["model.arch=gpt2"]),
    "gpt2-untied": ("GPT2LMHeadModel", ["model.arch=gpt2", "model.tie_embeddings=false", "model.activation=gelu", "model.d_ff=48"]),
    "llama": ("LlamaForCausalLM", ["model.arch=llama", "model.n_kv_heads=2", "model.rope_theta=50000"]),
    "llama-untied": ("LlamaForCausalLM", [
        "model.arch=llama", "model.tie_embeddings=false", "model.attention_bias=true", "model.mlp_bias=true"]),
}


def torch_python() -> str:
    python = os.environ.get("MPSHARD_TEST_TORCH", sys.executable)
    found = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, timeout=300, env=clean_env())
    if found.returncode:
        pytest.skip(f"{python} has no torch and transformers; set MPSHARD_TEST_TORCH to one that has")
    return python


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_logits(tmp_path: Path, name: str, dtype: str) -> None:
    python, (kind, settings) = torch_python(), MODELS[name]
    config = tmp_path / "config.toml"
    config.touch()
    result = launch(3, [
        "-m", "mpshard", "train", str(config), f"run.dir={tmp_path}/run", "model.n_layers=2", "model.d_model=32", "model.n_heads=4",
        "data.seq_len=16", "data.eval=none", "train.steps=3", "train.global_batch_size=6", "train.micro_batch_size=2", "optim.lr=0.02",
        f"checkpoint.dtype={dtype}", "checkpoint.max_shard_bytes=40000", *settings], timeout=120)
    assert result.returncode == 0, result.report()
    directory = tmp_path / "run" / "checkpoints" / "latest"
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    result = launch(2, ["-c", OURS, str(directory), str(tmp_path / "logits.npy")], timeout=60)
    assert result.returncode == 0, result.report()
    done = subprocess.run([python, "-c", THEIRS, str(directory), str(tmp_path / "logits.npy")], capture_output=True, text=True,
                          timeout=300, env=clean_env())
    assert done.returncode == 0, done.stderr
    found, parameters, difference, largest = done.stdout.split()
    assert found == kind and int(parameters) > 0
    assert float(difference) < 1e-5 * float(largest), done.stdout
