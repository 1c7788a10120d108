"""metrics.jsonl: one JSON object a line, one line a logged step or evaluation. Written by rank 0."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends lines and flushes each, so that a killed run keeps what it had said.

    path: None on the ranks that do not write.
    """

    def __init__(self, path: Path | None) -> None:
        self.file = None if path is None else path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and one that a killed run left unfinished: the run goes on from there."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    new = path.with_name(path.name + ".partial")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)
