"""Which parameters learn, and names that are nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from mpshard.config import ConfigError
from mpshard.nn.module import Model


def set_trainable(model: Model, patterns: Sequence[str]) -> None:
    """Let those parameters learn whose names match a pattern (shell style), freeze the others; before `shard`.

    A frozen parameter costs neither gradient nor moments, and nothing runs backward that only frozen ones come before.

    Raises ConfigError for a pattern that matches no parameter, with the nearest names.
    """
    names = [parameter.name for parameter in model.parameters]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f'optim.trainable: no parameter is called "{pattern}"{nearest(pattern, names)}')
    for parameter in model.parameters:
        parameter.trainable = any(fnmatchcase(parameter.name, pattern) for pattern in patterns)


def nearest(pattern: str, names: Iterable[str]) -> str:
    """"; the nearest names are a, b" among `names` and the words between their dots, or nothing if none is near."""
    words = [word for name in names for word in (name, *name.split(".")) if not word.isdigit()]
    found = difflib.get_close_matches(pattern.strip("*."), dict.fromkeys(words), 3)
    return f"; the nearest names are {', '.join(found)}" if found else ""
