"""What `mpshard report` makes of a metrics file: figures, a curve, events; and what it says of a bad one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mpshard.config import ConfigError
from mpshard.observe.report import loss_curve, read_metrics, screen, summary
from tests.launch import launch


def line(step: int, loss: float, **more: Any) -> dict[str, Any]:
    times = {"step_s": 0.5, "forward_s": 0.1, "backward_s": 0.2, "optim_s": 0.1, "gather_wait_s": 0.02, "reduce_wait_s": 0.03}
    return {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100, "tokens_per_s": 200.0, **times,
            "hidden_fraction": 0.9, "bytes_gathered": 10, "bytes_reduced": 5, "peak_bytes": 2**20, "world_size": 2} | more


LINES = [line(1, 4.0), line(2, 3.0, grad_norm=7.0), {"step": 2, "eval_loss": 3.5}, {"step": 2, "event": "rollback", "to": 1},
         line(2, 2.0, world_size=4), {"step": 3, "eval_loss": 2.5}, line(3, float("nan"))]


def write(path: Path, text: str = "") -> Path:
    (path / "metrics.jsonl").write_text(text or "".join(json.dumps(record) + "\n" for record in LINES))
    return path


def test_figures(tmp_path):
    found = summary(read_metrics(write(tmp_path)))
    assert (found["steps"], found["last_step"], found["tokens"], found["world_size"]) == (4, 3, 400, [2, 4])
    assert (found["loss_first"], found["loss_min"], found["eval_loss"], found["grad_norm_max"]) == (4.0, 2.0, 2.5, 7.0)
    assert found["tokens_per_s"] == 200.0 and found["wait_share"] == pytest.approx(0.1)
    assert found["events"] == [{"step": 2, "event": "rollback", "to": 1}]


def test_the_screen_shows_them(tmp_path):
    out = io.StringIO()
    Console(file=out, width=120).print(screen(read_metrics(write(tmp_path))))
    for text in ("4.0000", "evaluation 2.5000", "10.0% of a step", "rollback", "to=1", "2, then 4"):
        assert text in out.getvalue()


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    write(tmp_path, json.dumps(line(1, 4.0)) + '\n{"step": 2, "lo')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize(("text", "says"), [("{}\nnonsense\n{}\n", "line 2 is not JSON"), ("[1]\n", "line 1 is not an object")])
def test_a_bad_line_is_named(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        read_metrics(write(tmp_path, text))


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_metrics(tmp_path)
    with pytest.raises(ConfigError, match="not logged a step"):
        summary([{"step": 1, "eval_loss": 2.0}])


def test_the_curve_falls_from_the_top_left_to_the_bottom_right():
    curve = loss_curve([(step, 8.0 - step) for step in range(1, 8)], size=(14, 4)).splitlines()
    assert curve[0].startswith("  7.0000 ") and curve[3].startswith("  1.0000 ")
    marks = [[i for i, c in enumerate(row[9:]) if c != "\u2800"] for row in curve[:4]]
    assert marks[0][0] == 0 and marks[3][-1] == 13 and sum(marks, []) == sorted(sum(marks, []))
    assert curve[4].split() == ["step", "1", "7"]


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(5, float("inf"))], []])
def test_curves_of_little(points):
    assert loss_curve(points)


@pytest.mark.mpi
def test_the_command(tmp_path):
    write(tmp_path)
    done = launch(1, ["-m", "mpshard", "report", str(tmp_path), "--json"])
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == 4, done.report()
    assert launch(1, ["-m", "mpshard", "report", str(tmp_path / "none")]).returncode == 2
