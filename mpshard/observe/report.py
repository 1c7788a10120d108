"""`mpshard report RUN`: what a run's metrics.jsonl says, on one screen."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mpshard.config import ConfigError

PLOT = (64, 10)  # characters: width, height of the loss curve
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of RUN/metrics.jsonl, or of the file itself. A last line that a kill cut short is left out.

    Raises ConfigError if there is no such file, or a line in it that is no JSON object.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a run directory") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ConfigError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {number} is not an object: {line[:60]!r}")
        records.append(record)
    return records


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a run. Times and rates are medians over the logged steps; `events` are the lines that tell of one.

    Raises ConfigError if no step has been logged.
    """
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise ConfigError("the run has not logged a step yet")
    evaluations = [{"step": r["step"], "eval_loss": r["eval_loss"]} for r in records if "eval_loss" in r]
    losses = [record["loss"] for record in steps if math.isfinite(record["loss"])]
    found: dict[str, Any] = {
        "steps": len(steps), "last_step": steps[-1]["step"], "world_size": list(dict.fromkeys(r["world_size"] for r in steps)),
        "tokens": sum(record["tokens"] for record in steps), "loss_first": steps[0]["loss"], "loss_last": steps[-1]["loss"],
        "loss_min": min(losses, default=math.nan), "eval_loss": evaluations[-1]["eval_loss"] if evaluations else None,
        "evaluations": evaluations, "grad_norm_max": max(record["grad_norm"] for record in steps)}
    for name in ("tokens_per_s", "step_s", "forward_s", "backward_s", "optim_s", "gather_wait_s", "reduce_wait_s", "hidden_fraction"):
        found[name] = statistics.median(record[name] for record in steps)
    found["wait_share"] = statistics.median((r["gather_wait_s"] + r["reduce_wait_s"]) / r["step_s"] for r in steps)
    for name in ("bytes_gathered", "bytes_reduced", "peak_bytes"):
        found[name] = max(record[name] for record in steps)
    return found | {"events": [record for record in records if "event" in record]}


def screen(records: Sequence[dict[str, Any]]) -> Group:
    """The same as tables and a loss curve, for a terminal."""
    found = summary(records)
    ranks = ", then ".join(map(str, found["world_size"]))
    table = Table(title=f"{found['steps']:,} logged steps, the last is {found['last_step']:,}; ranks: {ranks}", show_header=False)
    evaluation = "none" if found["eval_loss"] is None else f"{found['eval_loss']:.4f}"
    ms = {name: found[name] * 1e3 for name in found if name.endswith("_s")}
    for name, value in (
        ("loss", f"{found['loss_first']:.4f} -> {found['loss_last']:.4f}, least {found['loss_min']:.4f}; evaluation {evaluation}"),
        ("largest gradient norm", f"{found['grad_norm_max']:.3g}"),
        ("tokens", f"{found['tokens']:,}; {found['tokens_per_s']:,.0f} a second"),
        ("a step", "{step_s:,.1f} ms: forward {forward_s:,.1f}, backward {backward_s:,.1f}, optimizer {optim_s:,.1f}".format(**ms)),
        ("waits", "gathers {gather_wait_s:,.2f}, reduces {reduce_wait_s:,.2f} ms".format(**ms)
                  + f", {found['wait_share']:.1%} of a step; hidden {found['hidden_fraction']:.1%}"),
        ("bytes a step and rank", f"gathered {found['bytes_gathered']:,}, reduced {found['bytes_reduced']:,}"),
        ("peak memory of a rank", f"{found['peak_bytes'] / 2**20:,.1f} MiB"),
    ):
        table.add_row(name, value)
    parts: list[Any] = [table, Text(loss_curve([(r["step"], r["loss"]) for r in records if "loss" in r]))]
    if found["events"]:
        events = Table("step", "event", "", title="events")
        for event in found["events"]:
            rest = {key: value for key, value in event.items() if key not in ("step", "event")}
            events.add_row(str(event.get("step", "")), str(event["event"]), " ".join(f"{k}={v}" for k, v in rest.items()))
        parts.append(events)
    return Group(*parts)


def loss_curve(points: Sequence[tuple[float, float]], size: tuple[int, int] = PLOT) -> str:
    """(step, loss) points as text: each dot is the mean of the steps that share a column; 2 x 4 dots a character."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return "no finite loss"
    width, height = size[0] * 2, size[1] * 4
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    columns: dict[int, list[float]] = {}
    for x, y in points:
        columns.setdefault(min(width - 1, int((x - first) / (last - first) * width)), []).append(y)
    there = sorted(columns)  # columns without a step get a value in between
    means = np.interp(range(there[0], there[-1] + 1), there, [statistics.fmean(columns[column]) for column in there])
    low, high = float(means.min()), float(means.max())
    cells = [[0x2800] * size[0] for _ in range(size[1])]
    for column, mean in enumerate(means, there[0]):
        row = round((high - mean) / (high - low) * (height - 1)) if high > low else height // 2
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    labels = [f"{high:8.4f} "] + [" " * 9] * (size[1] - 2) + [f"{low:8.4f} "]
    lines = [label + "".join(map(chr, line)) for label, line in zip(labels, cells, strict=True)]
    return "\n".join([*lines, " " * 9 + f"step {first:g}" + f"{points[-1][0]:g}".rjust(size[0] - len(f"step {first:g}"))])
