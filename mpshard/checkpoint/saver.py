"""When checkpoints are written, and where: beside the training loop, or behind the following steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard.checkpoint import save, writing
from mpshard.checkpoint.manifest import State
from mpshard.comm.roll_call import roll_call
from mpshard.config import CheckpointConfig
from mpshard.shard.sharded import Sharded

if TYPE_CHECKING:
    from mpshard.optim import Optimizer


DEFAULTS = CheckpointConfig()


class Saver:
    """Writes checkpoints of a model and its optimizer into `root`. Made, and its methods called, on every rank.

    Parameters
    ----------
    settings: when, how many, in which form. config: the effective configuration, {"section.key": value}, written down.
    tokenizer, special_ids: as of `content_of`.

    Note on writing behind the steps (`async`). The slices and moments are copied (as many bytes as the weights' and the
    optimizer's slices, accounted as staging), and a thread writes the copies. At most one is in flight: the next one waits
    for it. All ranks learn of its end in the same step, in `poll`.
    """

    def __init__(self, root: str | Path, sharded: Sharded, optim: Optimizer, settings: CheckpointConfig = DEFAULTS,
                 config: dict[str, Any] | None = None, tokenizer: Mapping[str, bytes] | None = None,
                 special_ids: Mapping[str, Any] | None = None) -> None:
        self.settings, self.root, self.sharded, self.optim = settings, Path(root), sharded, optim
        self.config, self.tokenizer, self.special_ids = config or {}, tokenizer, special_ids
        self.comm = sharded.mesh.comm.Dup()
        self.saved_step = -1
        self.behind: writing.Behind | None = None

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint is to be written after `step` of `last` steps."""
        every = self.settings.every
        return step != self.saved_step and (step == last or (every > 0 and step % every == 0))

    def save(self, step: int, position: int) -> None:
        """Write the checkpoint of `step` (samples seen: `position`), or begin to. Collective.

        Raises ConfigError, on every rank, for what went wrong with this one or with the one before it.
        """
        self.wait()
        s = self.settings
        roll_call(self.comm, "Saver.save")
        content = save.content_of(
            self.sharded, self.optim, State(step=step, position=position, config=self.config), dtype=s.dtype,
            max_shard_bytes=s.max_shard_bytes, tokenizer=self.tokenizer, special_ids=self.special_ids,
            averaged=s.weights == "ema")
        self.saved_step = step
        device = self.sharded.device
        if s.async_:
            self.behind = writing.Behind(self.comm, self.root, save.snapshot(content, device), device, s.keep)
        else:
            writing.write(self.comm, self.root, content, device, s.keep)

    def poll(self) -> None:
        """Between steps: bring the checkpoint in flight on its way. Collective.

        Raises what went wrong with it, on every rank in the same step.
        """
        self._advance(wait=False)

    def wait(self) -> None:
        """Until nothing is in flight. Collective. Raises as `poll`."""
        self._advance(wait=True)

    def _advance(self, wait: bool) -> None:
        if self.behind is not None:
            behind, self.behind = self.behind, None  # if it fails it is over, too
            if not behind.advance(wait):
                self.behind = behind
