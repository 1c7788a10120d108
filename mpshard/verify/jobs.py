"""The runs that are compared: which, how each is started, and the verdict. Imports no MPI: each run is a job of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpshard.config import Config, ConfigError, load, validate
from mpshard.recover.mpiexec import plan_here
from mpshard.recover.supervise import cause, run
from mpshard.verify.compare import Dump, compare

LOOSE = 1e-3  # what runs may differ by if nothing makes them deterministic


@dataclass(frozen=True)
class Job:
    """One run: so many ranks, and what is varied."""

    ranks: int
    settings: tuple[str, ...]

    @property
    def label(self) -> str:
        return " ".join([f"{self.ranks} rank{'s' * (self.ranks > 1)}", *self.settings])


def jobs(ranks: Sequence[int], vary: Sequence[str]) -> list[Job]:
    """Every combination of the values of --vary (key=a,b,...) on every number of ranks; the first is the reference."""
    choices = []
    for words in vary:
        name, equals, values = words.partition("=")
        if not equals or not values:
            raise ConfigError(f"--vary {words}: write section.key=value,value,...")
        choices.append([f"{name}={value}" for value in _split(values)])
    return [Job(n, settings) for settings in itertools.product(*choices) for n in ranks]


def _split(values: str) -> list[str]:
    """At commas, but not inside brackets or quotes: [1,2],[3]."""
    parts, depth, quote = [""], 0, ""
    for character in values:
        if character == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        parts[-1] += character
    return parts


def verify(path: str, settings: Sequence[str], planned: Sequence[Job], steps: int, rtol: float | None, threads: int,
           say: Callable[[str], None]) -> dict[str, Any]:
    """Run every job and compare each with the first.

    rtol: the largest relative difference; 0: equal bits; None: 0 if shard.deterministic is set in all, else LOOSE.
    threads: of BLAS on every rank; 0: as many as the job of most ranks can have. say: prints a line.

    Returns {"rtol", "steps", "threads", "ok", "runs": [...]}, ready for JSON.
    Raises ConfigError for what the user must change, and for a run that fails, with its words.
    """
    if len(planned) < 2:
        raise ConfigError("one run has nothing to be compared with: give --ranks or --vary more values")
    configs = [_config(path, [*settings, *job.settings], job.ranks, steps) for job in planned]
    if rtol is None:
        rtol = 0.0 if all(config.shard.deterministic for config in configs) else LOOSE
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or max(1, cores // max(job.ranks for job in planned))
    folder = Path(tempfile.mkdtemp(prefix="mpshard-verify-"))
    try:
        runs = []
        reference: Dump | None = None
        for number, job in enumerate(planned):
            say(f"{number + 1} of {len(planned)}: {job.label}")
            found = _start(path, [*settings, *job.settings], job, folder / str(number), steps, threads)
            reference = reference or found
            difference = compare(found, reference)
            runs.append({"ranks": job.ranks, "settings": list(job.settings), "label": job.label, "losses": found.losses,
                         "norms": found.norms, "ok": difference.within(rtol), **difference.as_dict()})
            if found is not reference:
                shutil.rmtree(found.folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"rtol": rtol, "steps": steps, "threads": threads, "ok": all(entry["ok"] for entry in runs), "runs": runs}


def _config(path: str, settings: Sequence[str], ranks: int, steps: int) -> Config:
    config = load(path, settings)
    validate(config, ranks)
    if steps > config.train.steps:
        raise ConfigError(f"--steps {steps} is over train.steps={config.train.steps}; lower it")
    return config


def _start(path: str, settings: Sequence[str], job: Job, folder: Path, steps: int, threads: int) -> Dump:
    folder.mkdir()
    words = ["verify", path, *settings, "--dump", str(folder), "--steps", str(steps), "--threads", str(threads)]
    start = plan_here(job.ranks, "", words, os.environ)
    attempt = run(start.command, start.env)
    if attempt.status:
        raise ConfigError(f"{job.label}: ended with status {attempt.status}: {cause(attempt.said)}")
    return Dump(folder)
