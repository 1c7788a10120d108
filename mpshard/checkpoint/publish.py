"""A checkpoint directory appears whole or not at all. File system only, no MPI; one rank runs it.

Everything is written into `step-N.partial`. When all of it is on the disk and verified, one rename makes it `step-N`, then
the link `latest` is replaced, and only then older ones go. A kill at any instant leaves what `latest` names whole.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LATEST, PARTIAL, REPLACED = "latest", ".partial", ".replaced"
_STEP = re.compile(r"step-(\d+)(\.replaced)?$")


def folder_of(step: int) -> str:
    """step-00000100"""
    return f"step-{step:08}"


def step_of(directory: Path) -> int:
    """The step in a checkpoint directory's name; -1 for another name."""
    match = _STEP.match(directory.name)
    return int(match[1]) if match else -1


def begin(root: Path, step: int) -> Path:
    """An empty directory to write checkpoint `step` of `root` into; what interrupted saves left is removed.

    Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"*{PARTIAL}"):
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    partial = root / (folder_of(step) + PARTIAL)
    partial.mkdir()
    return partial


def discard(partial: Path) -> None:
    """Remove what a failed save has written, as far as that can be done."""
    shutil.rmtree(partial, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and see it onto the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """See a file's content, or a directory's entries (new, renamed, removed files), onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(partial: Path, keep: int) -> Path:
    """Give a finished directory its name, point `latest` to it, remove older ones; returns its new path.

    keep: how many checkpoints stay, this one included; 0 for all. Raises OSError.
    """
    root, final = partial.parent, partial.with_name(partial.name.removesuffix(PARTIAL))
    sync(partial)
    if final.exists():  # the run was taken back to an earlier step: the old one stands aside until the new one is there
        aside = final.with_name(final.name + REPLACED)
        if aside.exists():
            shutil.rmtree(aside)
        final.rename(aside)
    partial.rename(final)
    sync(root)
    point_latest(root, final.name)
    prune(root, keep)
    return final


def point_latest(root: Path, name: str) -> None:
    """Make `latest` a link to `name`, in one step."""
    link = root / (LATEST + PARTIAL)
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(root / LATEST)
    sync(root)


def candidates(root: Path) -> list[Path]:
    """Checkpoint directories, in the order in which to try them.

    First what `latest` names, then earlier steps, the nearest first; then later steps (of a run that was taken back).
    """
    found = [path for path in (root.iterdir() if root.is_dir() else ()) if _STEP.match(path.name) and path.is_dir()]
    latest = root / LATEST
    newest = (root / os.readlink(latest)) if latest.is_symlink() else None
    limit = step_of(newest) if newest in found else max(map(step_of, found), default=0)

    def rank(path: Path) -> tuple[bool, bool, int, bool]:
        step = step_of(path)
        return path != newest, step > limit, abs(limit - step), path.name.endswith(REPLACED)

    return sorted(found, key=rank)


def prune(root: Path, keep: int) -> None:
    """Remove all but the first `keep` of `candidates` (0: none), and what was replaced."""
    whole = [path for path in candidates(root) if not path.name.endswith(REPLACED)]
    going = [path for path in candidates(root) if path.name.endswith(REPLACED)] + (whole[keep:] if keep else [])
    for path in going:
        # Renamed first: a removal that is interrupted must not leave half a checkpoint under a checkpoint's name.
        doomed = path.with_name(path.name.removesuffix(REPLACED) + ".old" + PARTIAL)
        path.rename(doomed)
        shutil.rmtree(doomed)
    if going:
        sync(root)


def find(directory: Path) -> Path:
    """The model that `directory` stands for: itself, or the latest checkpoint of a run directory or its `checkpoints`."""
    if (directory / "config.json").exists():
        return directory
    for root in (directory / "checkpoints", directory):
        if found := candidates(root):
            return found[0]
    return directory
