"""Rooms import one way, ruff and mypy are content, no file is too long to read in one sitting."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, clean_env

LONGEST = 400  # lines


def run_tool(name: str, *args: str) -> None:
    beside = Path(sys.executable).parent / name
    tool = str(beside) if beside.exists() else shutil.which(name)
    if tool is None:
        pytest.skip(f"{name} is not installed: pip install '.[test]'")
    env = clean_env({"PYTHONPATH": str(ROOT)})
    done = subprocess.run([tool, *args], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


def test_imports_follow_the_order_of_the_rooms() -> None:
    run_tool("lint-imports", "--no-cache")


def test_ruff_finds_nothing() -> None:
    run_tool("ruff", "check", "--no-cache", "--quiet", "mpshard", "tests", "examples")


def test_types_agree(tmp_path: Path) -> None:
    run_tool("mypy", "--cache-dir", str(tmp_path))


def test_files_can_be_read_in_one_sitting() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "mpshard").rglob("*.py")}
    assert not {str(path): lines for path, lines in lengths.items() if lines > LONGEST}
