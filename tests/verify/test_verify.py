"""`mpshard verify`: distances between floats, which element is named, which runs are made, and whole comparisons."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from mpshard.config import ConfigError
from mpshard.verify.compare import NUMBERS, Dump, compare, ulp_distance
from mpshard.verify.jobs import Job, jobs
from tests.launch import ROOT, clean_env, launch


# -- arithmetic ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ulps_are_steps_between_neighbours(dtype):
    start = np.array([1.0, -1.0, 0.0, 1e-40, 1e30], dtype)
    up = start
    for steps in range(1, 4):
        up = np.nextafter(up, dtype(np.inf))
        # Between -0 and +0 lies nothing, but their bits differ, so a way across zero is one longer.
        assert ulp_distance(up, start).tolist() == [steps] * 5
    assert ulp_distance(np.array([0.0], dtype), np.array([-0.0], dtype)) == [1]
    nan = np.array([np.nan], dtype)
    assert ulp_distance(nan, nan) == [0] and ulp_distance(nan, np.array([1.0], dtype))[0] > 1 << 20


def dumped(folder, losses, norms, tensors, cuts):
    """A dump of whole tensors, each cut into pieces over two ranks."""
    folder.mkdir()
    ranks = [{}, {}]
    for name, value in tensors.items():
        cut = cuts[name]
        ranks[0][f"{name}|0|{cut}"], ranks[1][f"{name}|{cut}|{value.size}"] = value.ravel()[:cut], value.ravel()[cut:]
    for rank, pieces in enumerate(ranks):
        np.savez(folder / f"rank-{rank}.npz", **pieces)
    (folder / NUMBERS).write_text(json.dumps({"losses": losses, "norms": norms, "shapes": {n: v.shape for n, v in tensors.items()}}))
    return Dump(folder)


def test_the_first_element_that_differs_is_named_however_the_tensors_are_cut(tmp_path):
    random = np.random.default_rng(0)
    a = {"x.weight": random.standard_normal((3, 4), np.float32), "y": random.standard_normal(5, np.float32), "z": np.ones(2, np.float32)}
    b = {name: value.copy() for name, value in a.items()}
    b["y"][2] = np.nextafter(b["y"][2], np.float32(9))
    b["z"][1] = 2
    reference = dumped(tmp_path / "a", [2.0, 1.0], [3.0, 4.0], a, {"x.weight": 7, "y": 0, "z": 1})
    same = dumped(tmp_path / "same", [2.0, 1.0], [3.0, 4.0], a, {"x.weight": 1, "y": 5, "z": 2})
    other = dumped(tmp_path / "b", [2.0, 1.001], [3.0, 4.0], b, {"x.weight": 0, "y": 3, "z": 1})
    assert compare(same, reference).within(0)
    found = compare(other, reference)
    assert (found.tensors, found.first.tensor, found.first.index, found.first.ulps) == (2, "y", (2,), 1)
    assert (found.first_step, found.worst) == (2, "z") and found.loss == pytest.approx(1e-3)
    assert found.weights == pytest.approx(1 / np.sqrt(2)) and found.ulps == 1 << 23  # 1 and 2 are a whole binade apart
    assert not found.within(0) and not found.within(0.5) and found.within(0.8)


def test_what_is_not_finite_is_not_within(tmp_path):
    weights = {"x": np.ones(2, np.float32)}
    reference = dumped(tmp_path / "a", [1.0], [1.0], weights, {"x": 1})
    broken = dumped(tmp_path / "b", [float("nan")], [1.0], {"x": np.array([1, np.nan], np.float32)}, {"x": 1})
    assert not compare(broken, reference).within(1e9)


# -- which runs ------------------------------------------------------------------------------
def test_every_value_with_every_other_on_all_ranks():
    found = jobs([1, 2], ["shard.prefetch=0,2", 'shard.unit=block,["*.mlp.*", "x,y"]'])
    assert found[0] == Job(1, ("shard.prefetch=0", "shard.unit=block")) and len(found) == 8
    assert found[-1] == Job(2, ("shard.prefetch=2", 'shard.unit=["*.mlp.*", "x,y"]'))
    with pytest.raises(ConfigError, match="write section.key=value,value"):
        jobs([1], ["shard.prefetch"])


# -- whole -----------------------------------------------------------------------------------
TINY = """
[model]
n_layers = 1
d_model = 16
n_heads = 2
dropout = 0.1
[data]
seq_len = 16
train = "text.txt"
[train]
steps = 10
global_batch_size = 8
micro_batch_size = 2
[shard]
deterministic = true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    (folder / "text.txt").write_text("To be or not to be, that is the question. " * 100)
    (folder / "tiny.toml").write_text(TINY)
    return folder


def verify(folder, *words):
    return subprocess.run([sys.executable, "-m", "mpshard", "verify", "tiny.toml", *words], cwd=folder, capture_output=True, text=True,
                          timeout=120, env=clean_env({"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}), check=False)


@pytest.mark.mpi
def test_a_deterministic_training_is_the_same_everywhere(folder):
    done = verify(folder, "--ranks", "1,4", "--vary", "shard.strategy=full,none", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rtol"] == 0 and found["ok"] and [run["ranks"] for run in found["runs"]] == [1, 4, 1, 4]
    assert all(run["tensors"] == 0 and run["losses"] == found["runs"][0]["losses"] for run in found["runs"])
    assert not list(folder.glob("mpshard-verify-*")) and not (folder / "runs").exists()


@pytest.mark.mpi
def test_what_differs_is_named_and_the_status_is_1(folder):
    done = verify(folder, "--ranks", "1,2", "--vary", "optim.lr=1e-3,1.0001e-3", "--steps", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("DIFFERS") == 2 and "transformer.wte.weight[0, 0] is " in done.stdout
    assert verify(folder, "--ranks", "1", "--vary", "optim.lr=1e-3,1.0001e-3", "--steps", "2", "--rtol", "1e-3").returncode == 0


@pytest.mark.mpi
@pytest.mark.parametrize(("words", "expected"), [
    (["--ranks", "1"], "nothing to be compared with"), (["--ranks", "1,3"], "not a multiple of"), (["--ranks", "0"], "--ranks"),
    (["--vary", "shard.strategi=full,none"], "did you mean shard.strategy?"), (["--steps", "11"], "--steps 11 is over train.steps=10"),
    (["data.train=nothing.txt"], "nothing.txt")])
def test_what_cannot_be_run_is_refused(folder, words, expected):
    done = verify(folder, *words)
    assert done.returncode == 2 and expected in done.stderr, done.stderr


@pytest.mark.mpi
def test_ranks_of_a_launcher_are_refused(folder):
    result = launch(2, ["-m", "mpshard", "verify", str(folder / "tiny.toml")], timeout=60)
    assert result.returncode == 2 and "run it without mpirun" in result.stderr
