"""A directory appears whole or not at all: the file system is stopped after every single operation."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

from mpshard.checkpoint import publish


def save(root: Path, step: int, keep: int = 0, text: str = "whole") -> Path:
    partial = publish.begin(root, step)
    publish.write_file(partial / "a", text.encode())
    publish.write_file(partial / "b", text.encode())
    return publish.publish(partial, keep)


def is_whole(path: Path) -> bool:
    return (path / "a").exists() and (path / "a").read_bytes() == (path / "b").read_bytes()


def steps(root: Path) -> list[int]:
    return [publish.step_of(path) for path in publish.candidates(root)]


def test_the_last_ones_are_kept_and_latest_names_the_last(tmp_path):
    for step in (10, 20, 30, 40):
        final = save(tmp_path, step, keep=2)
    assert final == tmp_path / "step-00000040"
    assert os.readlink(tmp_path / "latest") == "step-00000040"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000030", "step-00000040"]


def test_order_in_which_to_try(tmp_path):
    for step in (10, 20, 30, 15):  # taken back from 30 to 15
        save(tmp_path, step)
    assert steps(tmp_path) == [15, 10, 20, 30]
    (tmp_path / "latest").unlink()
    assert steps(tmp_path) == [30, 20, 15, 10]


def test_a_run_that_was_taken_back_drops_what_came_after_first(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, keep=2)
    assert steps(tmp_path) == [15, 10]


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    save(tmp_path, 10, text="old")
    save(tmp_path, 10, text="new")
    assert [path.name for path in publish.candidates(tmp_path)] == ["step-00000010"]
    assert (tmp_path / "latest" / "a").read_text() == "new"


def test_what_an_interrupted_save_left_is_removed(tmp_path):
    partial = publish.begin(tmp_path, 10)
    publish.write_file(partial / "a", b"half")
    assert publish.candidates(tmp_path) == []
    save(tmp_path, 20)
    assert not partial.exists()


class Stopped(BaseException):
    """The process is gone: no handler runs."""


@contextlib.contextmanager
def stopping_at(operation: int, monkeypatch):
    """Only the first `operation` changes of the file system happen."""
    counter = itertools.count()

    def limited(function):
        def call(*args, **kwargs):
            if next(counter) >= operation:
                raise Stopped
            return function(*args, **kwargs)
        return call

    with monkeypatch.context() as patch:
        for owner, name in ((os, "rename"), (os, "replace"), (os, "symlink"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"),
                            (os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "symlink_to"), (Path, "unlink")):
            patch.setattr(owner, name, limited(getattr(owner, name)))
        yield counter


@pytest.mark.parametrize("again", [30, 20], ids=["next step", "a step again"])
def test_stopped_anywhere_there_is_always_a_whole_one_to_resume_from(tmp_path, monkeypatch, again):
    def prepare(root: Path) -> Path:
        save(root, 10)
        save(root, 20)
        return root

    for operation in range(1000):
        root = prepare(tmp_path / str(operation))
        try:
            with stopping_at(operation, monkeypatch):
                save(root, again, keep=1, text="new")
        except Stopped:
            first = publish.candidates(root)[0]
            assert is_whole(first), f"after {operation} operations {first} is not whole"
            assert publish.step_of(first) >= 20
            if again != 20:
                assert is_whole(root / "latest"), f"after {operation} operations latest names what is not whole"
            save(root, 40, keep=2)  # and the next save cleans up
            assert not [path for path in root.iterdir() if path.name.endswith((".partial", ".replaced"))]
            shutil.rmtree(root)
        else:
            break
    assert 10 < operation < 999  # it did stop at every operation, and it got through in the end
    assert [path.name for path in publish.candidates(root)] == [f"step-{again:08}"]


def test_find_takes_a_model_a_checkpoint_a_run(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    partial = publish.begin(root, 7)
    publish.write_file(partial / "config.json", b"{}")
    final = publish.publish(partial, 0)
    for directory in (tmp_path / "run", root, final):
        assert publish.find(directory) == final
    assert publish.find(root / "latest") == root / "latest"
    assert publish.find(tmp_path / "none") == tmp_path / "none"
