"""Gathering weights in 8 bits, or multiplying in them, does not change how the standard example learns: minutes, run with `-m slow`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.launch import ROOT, launch

STEPS, WINDOW = 200, 20
pytestmark = [pytest.mark.slow, pytest.mark.mpi]


def losses(folder, *settings):
    result = launch(2, ["-m", "mpshard", "train", str(ROOT / "examples" / "stdlib_gpt.toml"), f"train.steps={STEPS}", "data.eval=none",
                        "train.eval_every=0", "train.eval_batches=0", "train.sample_tokens=0", "train.sample_prompt=", f"run.dir={folder}",
                        "precision.param=bf16", *settings], timeout=3600)
    assert result.returncode == 0, result.report()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines]), lines[-1]["bytes_gathered"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    found = losses(tmp_path_factory.mktemp("bf16") / "run")
    assert len(found[0]) == STEPS and found[0][-10:].mean() < 0.6 * found[0][0]
    return found


@pytest.mark.parametrize(("setting", "bytes_of_bf16"), [("precision.gather=fp8_e4m3", (1 + 1 / 128) / 2), ("precision.products=fp8", 1)])
def test_fp8_learns_as_bf16_does(tmp_path, wide, setting, bytes_of_bf16):
    short, short_bytes = losses(tmp_path / "fp8", setting)
    assert len(short) == STEPS
    # A step's loss jumps about where the model learns fastest, with any rounding; the curve is the mean over some steps.
    curves = [values.reshape(-1, WINDOW).mean(axis=1) for values in (wide[0], short)]
    apart = np.abs(curves[1] / curves[0] - 1)
    print(f"means of {WINDOW} steps differ by {apart.max():.4f} at most, single steps by {np.abs(short / wide[0] - 1).max():.4f}; "
          f"bf16 {np.round(curves[0], 4)}, {setting} {np.round(curves[1], 4)}; bytes gathered a step {wide[1]:,} and {short_bytes:,}")
    assert apart.max() < 0.02
    assert short_bytes == pytest.approx(wide[1] * bytes_of_bf16, rel=1e-3)
