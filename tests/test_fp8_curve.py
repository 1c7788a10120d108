"""Gathering weights in 8 bits does not change how the standard example learns: minutes, run with `-m slow`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.launch import ROOT, launch

STEPS, WINDOW = 200, 20


def losses(folder, *settings):
    result = launch(2, ["-m", "mpshard", "train", str(ROOT / "examples" / "stdlib_gpt.toml"), f"train.steps={STEPS}", "data.eval=none",
                        "train.eval_every=0", "train.eval_batches=0", "train.sample_tokens=0", "train.sample_prompt=", f"run.dir={folder}",
                        "precision.param=bf16", *settings], timeout=3600)
    assert result.returncode == 0, result.report()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines]), lines[-1]["bytes_gathered"]


@pytest.mark.slow
@pytest.mark.mpi
def test_fp8_gathers_learn_as_bf16_does(tmp_path):
    wide, wide_bytes = losses(tmp_path / "bf16")
    short, short_bytes = losses(tmp_path / "fp8", "precision.gather=fp8_e4m3")
    assert len(wide) == len(short) == STEPS and wide[-10:].mean() < 0.6 * wide[0]
    # A step's loss jumps about where the model learns fastest, with any rounding; the curve is the mean over some steps.
    curves = [values.reshape(-1, WINDOW).mean(axis=1) for values in (wide, short)]
    apart = np.abs(curves[1] / curves[0] - 1)
    print(f"means of {WINDOW} steps differ by {apart.max():.4f} at most, single steps by {np.abs(short / wide - 1).max():.4f}; "
          f"bf16 {np.round(curves[0], 4)}, fp8 {np.round(curves[1], 4)}; bytes gathered a step {wide_bytes:,} and {short_bytes:,}")
    assert apart.max() < 0.02
    assert short_bytes == pytest.approx(wide_bytes / 2 * (1 + 1 / 128), rel=1e-3)
