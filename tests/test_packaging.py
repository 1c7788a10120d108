"""What importing and installing promise: no MPI and no CuPy on import, one version, extras that exist."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from mpshard.device import c_library
from tests.launch import ROOT, clean_env


def loaded_after(statement: str) -> set[str]:
    """Names of the modules a fresh interpreter holds after the statement."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    env = clean_env({"PYTHONPATH": str(ROOT)})
    return set(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "module",
    ["mpshard", "mpshard.config", "mpshard.data", "mpshard.device", "mpshard.models",
     "mpshard.comm", "mpshard.optim", "mpshard.cli", "mpshard.shard.layout", "mpshard.shard.schedule", "mpshard.shard.grouping"],
)  # fmt: skip
def test_import_starts_neither_mpi_nor_cupy(module: str) -> None:
    assert not loaded_after(f"import {module}") & {"mpi4py.MPI", "cupy"}


def test_no_place_of_a_machine_is_in_the_metadata() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: mpshard.__version__"
    assert {"mpich", "openmpi", "cuda12", "cuda13", "hf", "test", "dev"} <= set(setup["options.extras_require"])


def test_the_installation_builds_the_compiled_kernels() -> None:
    urls = [json.loads(found.read_text("direct_url.json") or "{}") for found in metadata.distributions(name="mpshard")]
    if not any(url.get("dir_info", {}).get("editable") for url in urls) or shutil.which("cc") is None:
        pytest.skip("mpshard is not installed from here (pip install -e .), or there is no C compiler")
    assert not isinstance(c_library.load(), str), c_library.load()


def test_ci_runs_what_the_readme_tells_people_to_run() -> None:
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"python -m pytest\b[^\n`]*", readme)
    assert command is not None
    assert command[0].strip() in (ROOT / ".ci" / "run").read_text()


def test_the_room_shard_and_the_function_shard_share_their_name() -> None:
    code = """import mpshard as mps, mpshard.shard.layout
assert callable(mps.shard)
try: mps.shard(None, strategy="nonsense")
except ValueError as error: print(error)
from mpshard.shard import Sharded, shard
assert callable(mps.shard) and mps.shard.layout and mps.Sharded is Sharded"""
    env = clean_env({"PYTHONPATH": str(ROOT)})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'strategy="nonsense"' in done.stdout
