"""The table of failures: each ends everywhere, not with status 0, with one readable cause; nothing is left behind.

(The limit of `launch` is the clock: a job that it has to end has status 124.) Run under the MPI of this environment,
and, with `-m cluster`, under srun.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpshard.checkpoint.manifest import open_store
from mpshard.checkpoint.publish import candidates
from tests.launch import TIMED_OUT, Result, launch

pytestmark = pytest.mark.mpi

DRIVER = Path(__file__).with_name("faulty_train.py")
RANKS, FAULTY, STEP = 3, 1, 7
SETTINGS = ["model.n_layers=2", "model.d_model=32", "model.n_heads=2", "data.train=text.txt", "data.seq_len=16", "train.steps=100000",
            "train.global_batch_size=6", "train.micro_batch_size=1", "checkpoint.every=5", "run.dir=run"]
QUIET = "shard.progress=poll"  # a setting that changes nothing

SPOKEN = [  # how, status, what the cause must say, more settings
    ("raise", 1, "ValueError: boom", QUIET),
    ("communication thread", 1, "ValueError: boom", "shard.progress=thread shard.transport=mpi"),
    ("checkpoint thread", 1, "ValueError: boom", "checkpoint.async=true"),
    ("exit", 3, "this rank left while the others were still at work", QUIET),
    ("exit 0", 1, "this rank left while the others were still at work", QUIET),
    ("memory", 1, "Unable to allocate 1.00 GiB", QUIET),
    ("SIGINT", 130, "interrupted", QUIET),
]
STALLED = [
    ("stall", f"rank {FAULTY} (", f"is at step {STEP}, the update; 2 others wait in the figures of all ranks"),
    ("SIGSTOP", f"rank {FAULTY} did not answer", f"2 others wait at step {STEP}, the figures of all ranks"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty.toml").touch()
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 100)
    return tmp_path


def failing(folder: Path, how: str, *settings: str, seconds: float = 60) -> Result:
    """Rank FAULTY of RANKS fails; what must be so in every case is checked."""
    arguments = [str(DRIVER), how, str(FAULTY), str(STEP), "train", "empty.toml", *SETTINGS, *settings]
    for _ in range(2):
        result = launch(RANKS, arguments, seconds, cwd=folder)
        if not result.leaked:
            break  # else perhaps somebody else's: whatever appears under /dev/shm meanwhile is counted
        arguments.append("run.resume=never")
    assert result.returncode not in (0, TIMED_OUT), result.report()
    assert result.orphans == 0 and not result.leaked, result.report()
    whole = candidates(folder / "run" / "checkpoints")
    assert whole and [open_store(path).state.step for path in whole][0] >= 5
    assert not (folder / "run" / "done.json").exists()
    return result


def causes(result: Result) -> list[str]:
    """What ranks said of failing, each line once a rank; frames of tracebacks left out."""
    lines = [line for log in result.logs for line in log.splitlines()]
    return [line for line in lines if line.startswith("[rank ") and "]   " not in line]


@pytest.mark.parametrize(("how", "status", "words", "settings"), SPOKEN, ids=[row[0] for row in SPOKEN])
def test_a_rank_that_can_still_speak(folder, how, status, words, settings):
    result = failing(folder, how, *settings.split())
    assert result.returncode == status, result.report()
    said = causes(result)
    assert words in said[-1] and {line.partition("]")[0] for line in said} == {f"[rank {FAULTY} of {RANKS}"}, result.report()


@pytest.mark.parametrize("how", ["SIGKILL", "leave", "launcher SIGINT"])
def test_what_no_rank_can_report_is_the_launchers(folder, how):
    assert len(causes(failing(folder, how))) <= 1


@pytest.mark.parametrize("how", ["SIGTERM", "launcher SIGTERM"])
def test_asked_to_leave(folder, how):
    """To a rank: all leave in good order. To a launcher: it may leave them less time than that takes."""
    result = failing(folder, how)
    assert not [line for line in causes(result) if "Traceback" in line], result.report()
    if how == "SIGTERM":
        assert result.returncode == 75, result.report()
        assert result.stderr.count("mpshard: asked to leave: checkpoint written at step") == 1, result.report()


@pytest.mark.parametrize(("how", "who", "where"), STALLED, ids=[row[0] for row in STALLED])
def test_a_stalled_rank_is_named_by_the_watchdog(folder, how, who, where):
    result = failing(folder, how, "run.timeout=4")
    (said,) = {line.partition("] ")[2] for line in causes(result)}
    assert said.startswith("stalled for ") and who in said and where in said, result.report()
    assert (folder / "run" / "stalled" / "rank-00000.json").exists()


def test_all_at_once_and_the_reason_is_said_once(folder):
    """Ranks that fail alike in the same step."""
    arguments = ["train", "empty.toml", *SETTINGS, "optim.lr=1e30", "optim.clip_grad_norm=0"]
    result = launch(RANKS, ["-m", "mpshard", *arguments], 60, cwd=folder)
    assert result.returncode == 1, result.report()
    said = [line for log in result.logs for line in log.splitlines() if line.startswith("mpshard: ")]
    assert len(said) == 1 and "stopped before the update of step" in said[0] and "Traceback" not in result.stderr, result.report()
