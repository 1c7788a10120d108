"""Going on where a run stopped: which checkpoint, and what to do when it is damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard.checkpoint import load, publish
from mpshard.checkpoint.manifest import STATE, CheckpointError, DamagedError, State
from mpshard.comm.agree import on_root
from mpshard.config import ConfigError, show
from mpshard.shard.sharded import Sharded

if TYPE_CHECKING:
    from mpshard.optim import Optimizer

# Model keys that may change between a checkpoint and its resumption: they shape no tensor and change no function of it.
FREE = ("model.dropout", "model.init_from")


def is_run(directory: Path) -> bool:
    """Whether a directory holds a run: its configuration, metrics or checkpoints."""
    return any((directory / name).exists() for name in ("config.toml", "metrics.jsonl", "checkpoints"))


def set_aside(directory: Path) -> Path | None:
    """Rename a run's checkpoints out of the way of a new run in the same directory; their new path, None without any."""
    root = directory / "checkpoints"
    if not root.exists():
        return None
    number = 1
    while (aside := directory / f"checkpoints-old-{number}").exists():
        number += 1
    root.rename(aside)
    return aside


def resume(choice: str, run: Path, sharded: Sharded, optim: Optimizer, config: Mapping[str, Any],
           say: Callable[[str], None]) -> State:
    """Set a model and its optimizer as a checkpoint has them; a `State` of step 0 if there is none. Collective.

    A damaged checkpoint is named and the one before it is taken.

    Parameters
    ----------
    choice: as `run.resume`: "auto", "never", "", or a checkpoint or run directory. run: this run's directory.
    config: the effective configuration, {"section.key": value}. say: prints a line (on one rank).

    Raises
    ------
    ConfigError, on every rank, if a checkpoint that was asked for is not there, none is whole, or its model is another.
    """
    if choice in ("", "never"):
        return State()
    directory = run if choice == "auto" else Path(choice)
    found = on_root(sharded.mesh.comm, lambda: _checkpoints(directory))
    if not found:
        if choice != "auto":
            raise CheckpointError(f"run.resume={show(choice)}: no checkpoint there")
        if on_root(sharded.mesh.comm, lambda: is_run(run)):
            say(f"{run} has no checkpoint yet: starting at step 0")
        return State()
    problems = []
    for path in found:
        try:
            store = load.open_on_all(sharded.mesh.comm, path)
            if store.state is not None:
                for line in differences(store.state.config, config, path):
                    say(line)
            state = load.load_training(sharded, optim, store)
        except DamagedError as error:
            problems.append(str(error))
            say(f"{error}; not used")
            continue
        say(f"resumed from {path} at step {state.step} (written by {state.world} ranks)")
        return state
    raise CheckpointError(f"none of {len(found)} checkpoints can be used; {problems[0]}")


def _checkpoints(directory: Path) -> list[Path]:
    """Those of a run directory or of its `checkpoints`, in the order in which to try them; or the directory itself."""
    if (directory / STATE).exists() or publish.step_of(directory) >= 0:
        return [directory] if directory.is_dir() else []
    return publish.candidates(directory / "checkpoints") or publish.candidates(directory)


def differences(then: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> list[str]:
    """One line on what has been changed since a checkpoint, if anything; its paths and places do not count.

    Raises ConfigError if it is the model that changed.
    """
    changed = {key: (then[key], now[key]) for key in now
               if key in then and not key.startswith(("run.", "checkpoint.")) and _plain(then[key]) != _plain(now[key])}
    for key, (old, new) in changed.items():
        if key.startswith("model.") and key not in FREE:
            raise ConfigError(f"{key}={show(new)}, but {path} was made with {show(old)}: resume needs the same model")
    if not changed:
        return []
    return ["changed since: " + ", ".join(f"{key} {show(old)} -> {show(new)}" for key, (old, new) in changed.items())]


def _plain(value: Any) -> Any:
    """As JSON has it: a tuple is a list."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
