"""Whole runs of `mpshard train` on the stand-in for CuPy: the CPU's losses, asynchronous checkpoints, exact resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from tests.device import cuda_on_cpu
from tests.launch import launch

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))]
SETTINGS = [
    "model.arch=llama", "model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.n_kv_heads=2", "model.dropout=0.1",
    "data.seq_len=32", "train.steps=4", "train.global_batch_size=4", "train.micro_batch_size=1", "checkpoint.every=2",
    "run.device=cupy", "run.cuda_aware=no", "train.sample_tokens=4", "train.sample_prompt=def"]


def train(folder: Path, *settings: str) -> list[dict]:
    """Two ranks over a text of their own; the lines of metrics.jsonl."""
    config = folder.parent / "config.toml"
    text = folder.parent / "text.txt"
    config.write_text("")
    text.write_bytes(Path(__file__).read_bytes() * 4)
    command = ["-m", "mpi4py", "-m", "tests.device.on_stand_in", "train", str(config), *SETTINGS, f"data.train={text}",
               f"run.dir={folder}", *settings]
    result = launch(2, command, timeout=120)
    assert result.returncode == 0, result.report()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_the_same_run_as_on_the_cpu(tmp_path, transport):
    """Dropout draws the same masks, so the losses are the CPU's to rounding."""
    ours = train(tmp_path / "cupy", f"shard.transport={transport}", f"run.cuda_aware={'no' if transport == 'auto' else 'yes'}",
                 "checkpoint.async=true", "run.trace=true")
    theirs = train(tmp_path / "numpy", "run.device=numpy", "run.cuda_aware=auto")
    for name in ("loss", "grad_norm"):
        assert_allclose([line[name] for line in ours], [line[name] for line in theirs], rtol=1e-5)
    kinds = {event["name"].split()[0] for event in json.loads((tmp_path / "cupy/trace.json").read_text())["traceEvents"]}
    assert {"Gather", "Reduce", "Forward", "Backward"} & kinds


def test_resume_is_exact(tmp_path):
    """Also where masters and moments are in the host's memory, one of the two times."""
    whole = train(tmp_path / "run", "precision.param=bf16", "precision.reduce=bf16", "shard.offload=all", "checkpoint.async=true")
    again = train(tmp_path / "run", "precision.param=bf16", "precision.reduce=bf16",
                  f"run.resume={tmp_path}/run/checkpoints/step-00000002")
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
