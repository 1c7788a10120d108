"""`mpshard train` on a run directory that exists: refused, continued, started over; `mpshard inspect` of what it left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launch import Result, launch

pytestmark = pytest.mark.mpi
SMALL = """
[model]
n_layers = 1
d_model = 16
n_heads = 2
dropout = 0.1
[data]
seq_len = 16
eval = "none"
[train]
steps = 20
global_batch_size = 12
micro_batch_size = 1
[checkpoint]
every = 8
keep = 3
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    """An uninterrupted run on 2 ranks, with checkpoints of steps 8, 16 and 20; not to be changed."""
    run = config.parent / "whole"
    result = train(2, config, run)
    assert result.returncode == 0, result.report()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest", "step-00000008", "step-00000016", "step-00000020"]
    return run


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """The same run as if it had been killed in step 18, while it wrote a line of metrics."""
    run = tmp_path / "stopped"
    shutil.copytree(whole, run, symlinks=True)
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").symlink_to("step-00000016")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:17]) + lines[17][:20])
    return run


def train(ranks: int, config: Path, run: Path, *more: str) -> Result:
    return launch(ranks, ["-m", "mpshard", "train", str(config), f"run.dir={run}", *more], timeout=120)


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()


def test_a_run_is_not_overwritten(config: Path, whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    result = train(2, config, whole)
    assert result.returncode == 2
    assert [line for line in result.stderr.splitlines() if "holds a run already" in line and "run.resume=auto" in line]
    assert "Traceback" not in result.stderr and (whole / "metrics.jsonl").read_text() == before


def test_auto_goes_on_and_comes_to_the_same_bit_for_bit(config: Path, whole: Path, stopped: Path) -> None:
    result = train(2, config, stopped, "run.resume=auto")
    assert result.returncode == 0, result.report()
    assert "at step 16" in result.stdout
    assert losses(stopped) == losses(whole)  # every step once, in order
    assert weights(stopped) == weights(whole)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_auto_goes_on_with_another_number_of_ranks(config: Path, whole: Path, stopped: Path, ranks: int) -> None:
    result = train(ranks, config, stopped, "run.resume=auto")
    assert result.returncode == 0, result.report()
    for (step, loss, norm), (expected, loss_then, norm_then) in zip(losses(stopped), losses(whole), strict=True):
        assert step == expected
        assert (loss, norm) == (pytest.approx(loss_then, rel=1e-5), pytest.approx(norm_then, rel=1e-4))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(config: Path, whole: Path, stopped: Path) -> None:
    file = stopped / "checkpoints" / "step-00000016" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    result = train(2, config, stopped, "run.resume=auto")
    assert result.returncode == 0, result.report()
    assert f"{file} is altered" in result.stdout and "at step 8" in result.stdout, result.report()
    assert losses(stopped) == losses(whole) and weights(stopped) == weights(whole)


def test_from_a_named_checkpoint_into_another_directory(config: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "branch"
    result = train(2, config, run, f"run.resume={whole}/checkpoints/step-00000008")
    assert result.returncode == 0, result.report()
    assert losses(run) == losses(whole)[8:] and weights(run) == weights(whole)
    result = train(2, config, run, f"run.resume={tmp_path}/nowhere")
    assert result.returncode == 2 and "no checkpoint there" in result.stderr


def test_never_starts_over_and_sets_the_old_checkpoints_aside(config: Path, whole: Path, stopped: Path) -> None:
    result = train(2, config, stopped, "run.resume=never", "train.steps=3", "optim.schedule=constant")
    assert result.returncode == 0, result.report()
    assert [step for step, _, _ in losses(stopped)] == [1, 2, 3]
    assert (stopped / "checkpoints-old-1" / "step-00000016").is_dir()


def test_auto_without_a_run_starts_one_and_with_a_finished_one_does_nothing(config: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "new"
    assert train(1, config, run, "run.resume=auto", "train.steps=2", "optim.schedule=constant").returncode == 0
    before = (run / "metrics.jsonl").read_text()
    result = train(1, config, run, "run.resume=auto", "train.steps=2", "optim.schedule=constant")
    assert result.returncode == 0, result.report()
    assert (run / "metrics.jsonl").read_text() == before


def test_another_model_is_refused_in_one_line(config: Path, stopped: Path) -> None:
    result = train(2, config, stopped, "run.resume=auto", "model.d_model=32")
    assert result.returncode == 2
    assert [line for line in result.stderr.splitlines() if "model.d_model=32" in line and "16" in line], result.report()
    assert "Traceback" not in result.stderr


def test_inspect_reads_what_was_written(whole: Path) -> None:
    result = launch(2, ["-m", "mpshard", "inspect", str(whole), "--verify", "--json"], timeout=60)
    assert result.returncode == 0, result.report()
    about = json.loads(result.stdout)
    assert (about["step"], about["position"], about["world"], about["verified"]) == (20, 240, 2, True)
    result = launch(1, ["-m", "mpshard", "inspect", str(whole)], timeout=60)
    assert "step 20, 240 samples seen" in result.stdout and "16 x 48" in result.stdout, result.report()
