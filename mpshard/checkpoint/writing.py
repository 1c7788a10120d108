"""From the content of a checkpoint to a directory on the disk: all ranks together, or each behind its training steps.

Either way: an empty directory, every rank its own byte ranges, seen onto the disk, read back and compared, then published by
one rank. See `publish` for why a kill does no harm.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard.checkpoint import manifest, publish, transfer
from mpshard.checkpoint.manifest import STATE, CheckpointError
from mpshard.checkpoint.safetensors_file import Tensor, lay_out
from mpshard.checkpoint.save import Content
from mpshard.checkpoint.transfer import Sum
from mpshard.comm.agree import agree, on_root
from mpshard.config import ConfigError
from mpshard.device.base import Device

if TYPE_CHECKING:
    from mpi4py import MPI

Sums = dict[str, list[Sum]]  # of each file, of what this rank wrote


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    partial: its directory, not yet under its name. headers: for each safetensors file its first bytes and its tensors.
    keep: how many checkpoints stay when it is published; 0 for all.
    """

    partial: Path
    content: Content
    headers: Mapping[str, tuple[bytes, Mapping[str, Tensor]]]
    device: Device
    keep: int


def write(comm: MPI.Comm, root: str | Path, content: Content, device: Device, keep: int = 2) -> Path:
    """Write a checkpoint into `root`, verify it, publish it; returns its directory. Collective.

    keep: how many checkpoints stay in `root`; 0 for all.

    Raises
    ------
    ConfigError, on every rank: disk full, no permission, what was read back is not what was written. Earlier checkpoints
    are as they were, and nothing of this one is left.
    """
    draft = begin(comm, Path(root), content, device, keep)
    try:
        sums = {file: transfer.write(comm, draft.partial / file, header, tensors, content.pieces[file], device)
                for file, (header, tensors) in draft.headers.items()}
        agree(comm, lambda: verify(draft, sums))
        files = describe(comm, draft, sums)
        return on_root(comm, lambda: finish(draft, files))
    except ConfigError:
        on_root(comm, lambda: publish.discard(draft.partial))
        raise


class Behind:
    """A checkpoint that is written while training goes on. Made and advanced on every rank together.

    Note on threads. Each rank's thread writes and verifies the rank's own ranges, then one on rank 0 publishes; what the
    ranks must tell each other they do in `advance`, on the main thread. MPI-IO on a thread, beside the collectives of the
    steps, was tried first: MPICH did it, Open MPI 5.0 stood still in one test run of four.

    content: `save.snapshot` of it, since the arrays are read while training goes on. Otherwise as `write`.
    """

    def __init__(self, comm: MPI.Comm, root: Path, content: Content, device: Device, keep: int) -> None:
        self.comm, self.draft = comm, begin(comm, root, content, device, keep)
        self.sums: Sums = {}
        self.files: dict[str, Any] | None = None  # known once all ranks have written
        self._start(self._write)

    def advance(self, wait: bool = False) -> bool:
        """Whether the checkpoint is published; goes on with what the ranks must do together. Collective.

        wait: do not return before it is. Raises what went wrong: ConfigError on every rank; a bug on the rank that has it.
        """
        while True:
            if wait:
                self.thread.join()
            if self.error is not None and not isinstance(self.error, ConfigError | OSError):
                raise self.error
            if self.comm.allreduce(int(self.thread.is_alive())):
                return False
            try:
                agree(self.comm, self._raise)
            except ConfigError:
                on_root(self.comm, lambda: publish.discard(self.draft.partial))
                raise
            if self.files is not None:
                return True
            self.files = describe(self.comm, self.draft, self.sums)
            self._start(self._publish)

    def _start(self, action: Callable[[], None]) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                action()
            except BaseException as error:  # told by `advance`: it must not die unseen in this thread
                self.error = error

        self.thread = threading.Thread(target=run, name="mpshard-checkpoint")
        self.thread.start()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _write(self) -> None:
        draft = self.draft
        self.sums = {file: transfer.write_own(draft.partial / file, header if self.comm.rank == 0 else b"", tensors,
                                              draft.content.pieces[file], draft.device)
                     for file, (header, tensors) in draft.headers.items()}
        verify(draft, self.sums)

    def _publish(self) -> None:
        if self.files:  # on rank 0
            finish(self.draft, self.files)


# -- the steps that both have in common --------------------------------------------------------
def begin(comm: MPI.Comm, root: Path, content: Content, device: Device, keep: int) -> Draft:
    """An empty directory, on a disk with enough space. Collective; ConfigError on every rank."""
    headers = {file: lay_out(specs) for file, specs in content.specs.items()}
    needed = sum(max((t.stop for t in tensors.values()), default=len(header)) for header, tensors in headers.values())

    def make() -> Path:
        partial = publish.begin(root, content.state.step)
        if needed > (free := _free(partial)):
            publish.discard(partial)
            raise CheckpointError(f"{root}: no space for a checkpoint of {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free")
        return partial

    return Draft(on_root(comm, make), content, headers, device, keep)


def verify(draft: Draft, sums: Mapping[str, Sequence[Sum]]) -> None:
    """Read back what this rank has written and compare. Raises CheckpointError or OSError.

    Needed, not only careful: Open MPI's collective writes report success on a full disk.
    """
    for file, (_, tensors) in draft.headers.items():
        again = transfer.read_own(draft.partial / file, tensors, draft.content.pieces[file], draft.device)
        for ours, found in zip(sums[file], again, strict=True):
            if ours != found:
                raise CheckpointError(f"{draft.partial / file}: {ours.name} was not read back as it was written; "
                                      f"{_free(draft.partial) / 1e6:,.1f} MB are free there, is it full or is there a quota?")


def describe(comm: MPI.Comm, draft: Draft, sums: Mapping[str, Sequence[Sum]]) -> dict[str, Any]:
    """The records of the safetensors files for state.json, on rank 0; elsewhere nothing. Collective."""
    of_ranks = comm.gather(dict(sums))
    if of_ranks is None:
        return {}
    return {file: manifest.describe_data(header, tensors, manifest.in_order([s for of_rank in of_ranks for s in of_rank[file]]))
            for file, (header, tensors) in draft.headers.items()}


def finish(draft: Draft, files: Mapping[str, Any]) -> Path:
    """Write the small files and state.json, and publish; one rank does. Raises ConfigError or OSError."""
    texts = {name: manifest.describe_text(text) for name, text in draft.content.texts.items()}
    for name, text in draft.content.texts.items():
        publish.write_file(draft.partial / name, text)
    state = replace(draft.content.state, files={**files, **texts})
    publish.write_file(draft.partial / STATE, state.dumps().encode())
    manifest.open_store(draft.partial)  # what a resume will check, checked now
    return publish.publish(draft.partial, draft.keep)


def _free(path: Path) -> int:
    """Bytes that may still be written there."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
