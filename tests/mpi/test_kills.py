"""A rank is killed at a random instant of a save, again and again; each time the run goes on from a whole checkpoint.

In the end the run must have every step's loss, and the weights, of a run that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from tests.launch import Result, launch

pytestmark = pytest.mark.mpi
RANK = str(Path(__file__).with_name("killed_rank.py"))
RANKS = 2
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
global_batch_size = 4
micro_batch_size = 1
[checkpoint]
every = 1
max_shard_bytes = 16000
"""


def train(config: Path, run: Path, *more: str, kill: tuple[str, ...] = ("0", "0", "none", "0")) -> Result:
    return launch(RANKS, [RANK, *kill, "train", str(config), f"run.dir={run}", *more], timeout=120)


def lines(run: Path) -> list[tuple[int, float, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]


def weights(run: Path) -> list[bytes]:
    files = sorted((run / "checkpoints" / "latest").glob("*.safetensors"))
    assert len(files) > 2  # two or more of the model, one of the optimizer
    return [file.read_bytes() for file in files]


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_run_whose_ranks_are_killed_while_saving(tmp_path: Path, kills: int, asynchronous: str) -> None:
    kills = kills // 2  # half with each way of saving
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    config = tmp_path / "small.toml"
    config.write_text(SMALL)
    last = [f"train.steps={2 * kills + 4}", "optim.schedule=constant", f"checkpoint.async={asynchronous}"]

    undisturbed = train(config, tmp_path / "undisturbed", *last, kill=("0", "2", "count", "0"))
    assert undisturbed.returncode == 0, undisturbed.report()
    measured = [(int(events), float(seconds)) for events, seconds in re.findall(r"EVENTS (\d+) SECONDS (\S+)", undisturbed.stderr)]
    assert len(measured) == RANKS and min(events for events, _ in measured) > 100

    run, reached = tmp_path / "run", 0
    for number in range(kills):
        victim, save, how = draw.randrange(RANKS), draw.choice((1, 2)), draw.choice(("event", "timer"))
        events, seconds = measured[victim]
        limit = draw.random() * (events if how == "event" else seconds)
        result = train(config, run, *last, "run.resume=auto", kill=(str(victim), str(save), how, str(limit)))
        where = f"seed {seed}, kill {number}: rank {victim}, save {save}, {how} {limit}\n"
        assert not result.timed_out and not result.orphans, where + result.report()
        assert "Traceback" not in result.stderr and "not used" not in result.stdout, where + result.report()
        if found := re.search(r"KILLED IN SAVE OF STEP (\d+)", result.stderr):
            if how == "event":
                assert result.returncode != 0, where + result.report()
            step = int(found[1])
        else:
            assert number and result.returncode == 0, where + result.report()
            continue
        assert step > reached  # the checkpoint before it was there, the run went on from it
        reached = step - 1
    result = train(config, run, *last, "run.resume=auto")
    assert result.returncode == 0, f"seed {seed}\n" + result.report()
    assert "not used" not in result.stdout
    assert lines(run) == lines(tmp_path / "undisturbed")
    assert weights(run) == weights(tmp_path / "undisturbed")
    assert not list((run / "checkpoints").glob("*.partial"))
