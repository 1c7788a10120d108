"""Permissions bind everybody but root, as whom containers and CI run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Be nobody, if this process is root's, who may enter `folder` and what leads to it. What the block uses must have been
    imported: root's own Python may be closed to nobody."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
