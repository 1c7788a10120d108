"""What the user sees: one line for what he can repair, once, status 2, whatever the number of ranks; nobody waits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, Result, clean_env, is_open_mpi, launch

pytestmark = pytest.mark.mpi

TINY = """
[model]
n_layers = 1
d_model = 32
n_heads = 2
[data]
train = "text.txt"
seq_len = 16
[train]
steps = 3
global_batch_size = 30
micro_batch_size = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with tiny.toml and its data."""
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 100)
    (tmp_path / "file").write_text("not a folder")
    return tmp_path


def mpshard(n: int, folder: Path, *args: str, env: dict[str, str] | None = None, timeout: float = 60) -> Result:
    return launch(n, ["-m", "mpshard", *args], timeout, env=env, cwd=folder)


def said(result: Result) -> list[str]:
    """What the ranks wrote (the launcher's own words left out)."""
    return [line for log in result.logs for line in log.splitlines()]


REFUSED = [
    (["trian"], "invalid choice: 'trian'"),
    ([], "required: COMMAND; see mpshard --help"),
    (["train"], "required: CONFIG.toml"),
    (["train", "tiny.toml", "--fast"], "unrecognized arguments: --fast"),
    (["inspect"], "required: DIR; see mpshard inspect --help"),
    (["train", "nope.toml"], "no configuration file nope.toml"),
    (["train", "text.txt"], "text.txt is not valid TOML"),
    (["train", "tiny.toml", "optim.lrr=1"], "unknown key optim.lrr; did you mean optim.lr?"),
    (["train", "tiny.toml", "optmi.lr=1"], "unknown section optmi; did you mean optim?"),
    (["train", "tiny.toml", "optim.lr=fast"], 'optim.lr="fast" is a string; needed: number'),
    (["train", "tiny.toml", "train.steps=0"], "train.steps=0 must be at least 1"),
    (["train", "tiny.toml", "model.n_heads=5"], "model.n_heads=5 does not divide model.d_model=32"),
    (["train", "tiny.toml", "train.global_batch_size=7"], "train.global_batch_size=7 is not a multiple"),
    (["train", "tiny.toml", "data.train=nothing/*.txt"], "nothing/*.txt"),
    (["train", "tiny.toml", "run.dir=file/run"], "run.dir=file/run cannot be written (Not a directory)"),
    (["train", "tiny.toml", "run.dir=/proc/run"], "run.dir=/proc/run cannot be written"),
    (["train", "tiny.toml", "run.device=abacus"], 'run.device="abacus" is unknown'),
    (["inspect", "nowhere"], "nowhere"),
]
WORLDS = (1, 2, 3, 1, 2, 5)


@pytest.mark.parametrize(("n", "args", "words"),
                         [(WORLDS[i % 6] if "batch" not in words else 2, args, words) for i, (args, words) in enumerate(REFUSED)])
def test_what_the_user_can_repair_is_one_line(folder, n, args, words):
    result = mpshard(n, folder, *args)
    assert result.returncode == 2, result.report()
    lines = said(result)
    assert len(lines) == 1 and lines[0].startswith("mpshard: ") and words in lines[0], result.report()
    assert result.logs[0], "rank 0 speaks"
    assert not list(folder.glob("runs/*/*"))  # refused before anything was left behind


def test_a_gpu_that_is_not_there_is_one_line(folder):
    result = mpshard(2, folder, "train", "tiny.toml", "run.device=cupy")
    if result.returncode == 0:
        pytest.skip("there is a GPU")
    assert result.returncode == 2, result.report()
    (line,) = said(result)
    assert line.startswith("mpshard: run.device=cupy cannot be used: ") and line.endswith("use run.device=numpy")


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["bench", "step", "--help"], ["--version"]])
def test_help_and_version_are_printed_once(folder, args):
    result = mpshard(3, folder, *args)
    assert result.returncode == 0, result.report()
    assert result.logs[0] and result.logs[1:] == ("", "")
    if args == ["--version"]:
        assert re.fullmatch(r"mpshard \d+\.\d+\.\d+\n", result.logs[0])
    elif args[0] == "--help":
        assert "train" in result.stdout and "inspect" in result.stdout
    else:
        assert "example:" in result.stdout


def test_every_command_has_help_with_an_example():
    from mpshard.cli import Leave, parser

    def commands(parser):
        for action in parser._actions:
            for name, sub in (action.choices or {}).items() if isinstance(action.choices, dict) else ():
                yield name, sub
                yield from commands(sub)

    found = dict(commands(parser()))
    assert {"train", "inspect", "bench", "report"} <= found.keys()
    for name, sub in found.items():
        assert f"mpshard {name}" in sub.format_help() or name in ("step", "gemm", "collectives")
        assert "example:" in sub.format_help(), name
        with pytest.raises(Leave, match="example:"):
            sub.parse_args(["--help"])


def test_help_needs_no_mpi(folder):
    code = "from mpshard.cli import main, sys; sys.argv[1:] = ['train', '--help']; "
    code += "import atexit; atexit.register(lambda: print(sorted({'mpi4py', 'numpy'} & set(sys.modules)))); main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean_env(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- the world -------------------------------------------------------------------------------
def test_without_an_mpi_library_the_remedy_is_named(folder):
    result = mpshard(2, folder, "train", "tiny.toml", env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert result.returncode == 2, result.report()
    (line,) = said(result)
    assert line.startswith("mpshard: no MPI library") and "pip install 'mpshard[mpich]'" in line


def test_a_world_smaller_than_the_launcher_meant_is_refused(folder):
    variable = "OMPI_COMM_WORLD_SIZE" if is_open_mpi() else "PMI_SIZE"
    code = f"import os; import mpi4py.MPI; os.environ[{variable!r}] = '4'; from mpshard.cli import main; main(['train', 'tiny.toml'])"
    result = launch(1, ["-c", code], 60, cwd=folder)
    assert result.returncode == 2, result.report()
    (line,) = said(result)
    assert line.startswith(f"mpshard: started as one of 4 ranks ({variable}=4) but this MPI sees a world of 1")


@pytest.mark.parametrize(("environment", "size", "wrong"), [
    ({}, 1, False),
    ({"PMI_SIZE": "4"}, 4, False),
    ({"PMI_SIZE": "4"}, 1, True),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, True),
    ({"SLURM_NTASKS": "8"}, 1, False),  # one process of a batch script
    ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, 1, True),  # srun of the other kind
    ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4"}, 4, False),  # mpirun inside Slurm: a step of one helper a node
    ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4"}, 1, True),
])
def test_which_worlds_are_wrong(monkeypatch, environment, size, wrong):
    from mpshard import launcher

    for name in (*launcher._RANKS, *launcher._SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    complaint = launcher.wrong_world(size)
    assert (complaint is not None) == wrong
    assert not wrong or "\n" not in complaint
    assert launcher.rank() == int(environment.get("SLURM_PROCID", 0))


# -- a run -----------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2])
def test_a_run_leaves_its_configuration_and_metrics(folder, n):
    result = mpshard(n, folder, "train", "tiny.toml", "train.sample_tokens=5")
    assert result.returncode == 0, result.report()
    assert result.logs[1:] == ("",) * (n - 1) and "step 3/3" in result.logs[0]
    records = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3]
    for key in ("loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "forward_s", "backward_s", "optim_s", "gather_wait_s",
                "reduce_wait_s", "hidden_fraction", "bytes_gathered", "bytes_reduced", "peak_bytes"):
        assert all(isinstance(r[key], int | float) for r in steps), key
    assert {(r["world_size"], r["tokens"]) for r in steps} == {(n, 30 * 16)}
    assert 'n_layers = 1' in (folder / "runs/tiny/config.toml").read_text()
