"""Ranks killed at random moments: `mpshard launch` brings every run to the end that an undisturbed one has, bit for bit.

All 200 kills: `python -m pytest -m exhaustive tests/cluster/test_kills.py -s` (3 minutes on 2 idle cores).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import _ONE_THREAD, ROOT, TOKEN, _end, _processes, clean_env

pytestmark = pytest.mark.mpi

RANKS, STEPS, KILLS = 2, 16, 2  # kills a run: with a third the launcher may rightly give up before the first checkpoint
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1)
REQUEUE = 75
LIMIT = 120  # seconds a run
SETTINGS = ["model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.dropout=0.1", "data.train=text.txt", "data.seq_len=16",
            f"train.steps={STEPS}", "train.global_batch_size=8", "train.micro_batch_size=2", "checkpoint.every=4", "run.timeout=30"]


@dataclass
class Run:
    """What a run came to: the bytes of its last checkpoint, the loss of every step, seconds, and how ranks were killed."""

    files: dict[str, bytes]
    losses: list[tuple[int, float]]
    seconds: float
    kills: list[str]


def run(folder: Path, name: str, draw: random.Random | None = None, horizon: float = 0.0) -> Run:
    """Train to the end with `mpshard launch`, started again where it says so; kill ranks at moments up to `horizon` seconds."""
    token = uuid.uuid4().hex
    env = clean_env(_ONE_THREAD) | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), TOKEN: token}
    command = [sys.executable, "-m", "mpshard", "launch", "-n", str(RANKS), "--max-restarts", "5", "--", "train", "empty.toml", *SETTINGS,
               f"run.dir={name}", "run.resume=auto"]
    moments = sorted(draw.uniform(0, horizon) for _ in range(KILLS)) if draw else []
    begun, kills, segments = time.monotonic(), [], set()
    log = folder / f"{name}.log"
    try:
        while True:
            with log.open("ab") as output:
                job = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            while job.poll() is None:
                assert time.monotonic() - begun < LIMIT, f"{name} hangs:\n{log.read_text()}"
                if moments and time.monotonic() - begun > moments[0]:
                    ranks = [pid for pid, is_rank in _processes(token) if is_rank]
                    if ranks:  # else between two attempts: the next rank to appear
                        pid, number = draw.choice(ranks), draw.choice(SIGNALS)
                        segments |= named_segments(pid)
                        with suppress(ProcessLookupError):
                            os.kill(pid, number)
                        kills.append(f"{number.name} at {time.monotonic() - begun:.2f} s")
                        del moments[0]
                time.sleep(0.02)
            if job.returncode != REQUEUE:
                break
        assert job.returncode == 0, f"{name}: status {job.returncode}\n{log.read_text()}"
        assert not _processes(token)
        assert not [path for path in segments if os.path.exists(path)]
    finally:
        _end(token)
    directory = folder / name
    assert json.loads((directory / "done.json").read_text())["step"] == STEPS
    last = directory / "checkpoints" / "latest"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Run({file: (last / file).read_bytes() for file in ("model.safetensors", "optimizer.safetensors")},
               [(line["step"], line["loss"]) for line in lines if "loss" in line], time.monotonic() - begun, kills)


def named_segments(pid: int) -> set[str]:
    """Shared memory that a process maps and that still has a name."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return set()


@pytest.mark.parametrize("wanted", [10, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_killed_runs_end_like_an_undisturbed_one(tmp_path, wanted):
    (tmp_path / "empty.toml").touch()
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 100)
    undisturbed = run(tmp_path, "undisturbed")
    assert [step for step, _ in undisturbed.losses] == list(range(1, STEPS + 1))
    seed, kills = random.SystemRandom().randrange(2**32), 0
    print(f"{wanted} kills, seeds from {seed}; undisturbed {undisturbed.seconds:.1f} s")
    while kills < wanted:
        found = run(tmp_path, f"seed-{seed}", random.Random(seed), horizon=1.2 * undisturbed.seconds)
        kills += len(found.kills)
        print(f"seed {seed}: {', '.join(found.kills) or 'done before the first'}; {found.seconds:.1f} s", flush=True)
        assert found.losses == undisturbed.losses, f"seed {seed}"
        assert found.files == undisturbed.files, f"seed {seed}"
        seed += 1
    print(f"{kills} kills")
