"""The scripts of `examples/mechanics`: each runs by itself on any number of ranks and asserts its own claims."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.launch import ROOT, Result, launch, mpiexec

SCRIPTS = sorted((ROOT / "examples" / "mechanics").glob("0*.py"))
FSDP = SCRIPTS[-1]


def each(scripts: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("script", scripts, ids=lambda script: script.stem)


@pytest.fixture(scope="module")
def mpi() -> None:
    """Skip where no job can be started."""
    try:
        mpiexec()
    except RuntimeError as error:
        pytest.skip(str(error))


def run(script: Path, ranks: int) -> Result:
    result = launch(ranks, [script], timeout=60)
    assert result.returncode == 0, result.report()
    return result


@pytest.mark.mpi
@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@each(SCRIPTS[:-1])
def test_script_holds_what_it_claims(script: Path, ranks: int) -> None:
    result = run(script, ranks)
    assert result.logs[0].endswith(f"ok on {ranks} rank(s)\n"), result.report()
    assert not any(result.logs[1:]), "ranks other than 0 print nothing\n" + result.report()


@pytest.mark.mpi
@pytest.mark.usefixtures("mpi")
def test_fsdp_prints_one_curve_on_any_number_of_ranks() -> None:
    curves, kept = {}, {}
    for ranks in (1, 2, 3, 4):
        text = run(FSDP, ranks).stdout
        curves[ranks] = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
        kept[ranks] = int(re.findall(r"keeps (\d+) bytes", text)[0])
    assert curves[1][0] == pytest.approx(5.55, abs=0.1)  # ln 256: it begins by knowing nothing
    assert curves[1][-1] < curves[1][0] / 2
    for ranks in (2, 3, 4):
        assert curves[ranks] == pytest.approx(curves[1], rel=0, abs=1e-6)
        assert kept[ranks] == pytest.approx(kept[1] / ranks, rel=1e-3)  # but for padding


@pytest.mark.mpi
@pytest.mark.usefixtures("mpi")
@each([SCRIPTS[0], FSDP])
def test_one_rank_that_fails_ends_the_job(script: Path, tmp_path: Path) -> None:
    """Without the hook the other rank would wait in its next collective until the time limit."""
    source = script.read_text(encoding="utf-8")
    hook = re.search(r"^sys\.excepthook = .*\n", source, re.MULTILINE)
    assert hook is not None
    broken = tmp_path / script.name
    fault = 'if rank == size - 1:\n    raise RuntimeError("a fault put in by the test")\n'
    broken.write_text(source[: hook.end()] + fault + source[hook.end() :], encoding="utf-8")
    result = launch(2, [broken], timeout=30)
    assert not result.timed_out and result.returncode != 0, result.report()
    assert "RuntimeError: a fault put in by the test" in result.stderr


@each(SCRIPTS[:-1])
def test_script_has_the_hook_that_ends_the_job(script: Path) -> None:
    """The one that `test_one_rank_that_fails_ends_the_job` tries in the first script."""
    hook = re.compile(r"^def end_the_job.*?^sys\.excepthook = end_the_job\b", re.MULTILINE | re.DOTALL)
    found, tried = (hook.findall(path.read_text(encoding="utf-8")) for path in (script, SCRIPTS[0]))
    assert len(found) == 1 and found == tried


@each(SCRIPTS)
def test_script_needs_only_numpy_and_mpi4py(script: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert {"numpy", "mpi4py"} <= imported <= {"numpy", "mpi4py", "collections", "math", "os", "sys", "types"}


def test_fsdp_is_100_lines_of_code() -> None:
    """Lines that are not empty, not a comment and not part of a docstring."""
    source = FSDP.read_text(encoding="utf-8")
    lines = {i for i, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, int(node.end_lineno or 0) + 1))
    assert len(lines) <= 100
