"""When checkpoints are written, and where: beside the training loop, or behind the following steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard.checkpoint import save
from mpshard.checkpoint.manifest import State
from mpshard.comm.files import can_write_from_threads
from mpshard.comm.roll_call import roll_call
from mpshard.config import CheckpointConfig, ConfigError
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
    optimizer's slices, accounted as staging), and a thread writes the copies with a communicator of its own. At most one
    is in flight: the next one waits for it. All ranks learn of its end in the same step, in `poll`.
    """

    def __init__(self, root: str | Path, sharded: Sharded, optim: Optimizer, settings: CheckpointConfig = DEFAULTS,
                 config: dict[str, Any] | None = None, tokenizer: Mapping[str, bytes] | None = None,
                 special_ids: Mapping[str, Any] | None = None) -> None:
        if settings.async_ and not can_write_from_threads():
            raise ConfigError("checkpoint.async=true needs an MPI with MPI_THREAD_MULTIPLE; use checkpoint.async=false")
        self.settings, self.root, self.sharded, self.optim = settings, Path(root), sharded, optim
        self.config, self.tokenizer, self.special_ids = config or {}, tokenizer, special_ids
        self.comm = sharded.mesh.comm.Dup()
        self.saved_step = -1
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

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
        if not s.async_:
            save.write(self.comm, self.root, content, self.sharded.device, s.keep)
            return
        copies = save.snapshot(content, self.sharded.device)
        self.thread = threading.Thread(target=self._write, args=(copies,), name="mpshard-checkpoint")
        self.thread.start()

    def _write(self, content: save.Content) -> None:
        try:
            save.write(self.comm, self.root, content, self.sharded.device, self.settings.keep)
        except BaseException as error:  # told to the training loop: it must not die unseen in this thread
            self.error = error

    def poll(self) -> None:
        """Between steps: if the checkpoint in flight has been written, or has failed, on every rank, say so. Collective.

        Raises what went wrong, on every rank in the same step.
        """
        if self.thread is None:
            return
        if self.error is not None and not isinstance(self.error, ConfigError):  # a bug: others may never come
            raise self.error
        running = self.sharded.mesh.comm.allreduce(int(self.thread.is_alive()))
        if not running:
            self.wait()

    def wait(self) -> None:
        """Until nothing is in flight. Collective. Raises as `poll`."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error
