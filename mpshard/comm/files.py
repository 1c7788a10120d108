"""Files that all ranks write or read together, by MPI-IO (MPI-4.1, chapter 14)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpshard.comm.agree import agree
from mpshard.config import ConfigError

T = TypeVar("T")

_ERRNO = {MPI.ERR_NO_SPACE: errno.ENOSPC, MPI.ERR_QUOTA: errno.EDQUOT, MPI.ERR_READ_ONLY: errno.EROFS,
          MPI.ERR_ACCESS: errno.EACCES, MPI.ERR_NO_SUCH_FILE: errno.ENOENT}


class SharedFile:
    """One file, open on every rank of a communicator; a context manager.

    Opening, closing and transfers are collective. What fails is an OSError with the file's name; a transfer that fails
    on some ranks raises on those alone, and they must go on taking part (see `in_rounds`).

    Parameters
    ----------
    comm: who takes part; used by nobody else at the same time.
    path: seen by all of them.
    write: create it and write; otherwise it is read.
    """

    def __init__(self, comm: MPI.Comm, path: str | os.PathLike[str], write: bool = False) -> None:
        self.comm, self.path, self.write = comm, os.fspath(path), write
        mode = MPI.MODE_CREATE | MPI.MODE_WRONLY if write else MPI.MODE_RDONLY
        # Agreed on: not every library tells all ranks when the opening fails on one.
        self.file = agree(comm, lambda: self._call(lambda: MPI.File.Open(comm, self.path, mode)))  # type: ignore[arg-type]

    def write_at_all(self, offset: int, data: np.ndarray) -> None:
        """Write bytes (n,) uint8 at `offset`; n may be 0 on ranks that have nothing to write."""
        status = MPI.Status()
        self._call(lambda: self.file.Write_at_all(offset, [data, MPI.BYTE], status))
        self._expect(status, data.size, "written")

    def read_at_all(self, offset: int, data: np.ndarray) -> None:
        """Fill data (n,) uint8 from `offset` on; n may be 0."""
        status = MPI.Status()
        self._call(lambda: self.file.Read_at_all(offset, [data, MPI.BYTE], status))
        self._expect(status, data.size, "read")

    def close(self) -> None:
        """Close; ConfigError on all ranks if that fails. What was written may still be on its way to the disk.

        MPI_File_sync is not used: in Open MPI the others wait for ever for a rank on which it fails.
        """
        agree(self.comm, lambda: self._call(self.file.Close))

    def __enter__(self) -> SharedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, ConfigError):  # on all ranks alike; after any other error closing together would hang
            try:
                self.file.Close()
            except MPI.Exception:
                pass  # the first error is the one to tell

    def _expect(self, status: MPI.Status, wanted: int, verb: str) -> None:
        done = status.Get_count(MPI.BYTE)
        if wanted and done != wanted:
            raise OSError(errno.EIO, f"{done} of {wanted} bytes {verb}", self.path)

    def _call(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except MPI.Exception as error:
            code = _ERRNO.get(error.Get_error_class(), errno.EIO)
            # MPICH's text is a stack, what happened stands at the end of its last line.
            text = error.Get_error_string().strip().splitlines()[-1].rpartition(": ")[2]
            reason = os.strerror(code) if code != errno.EIO else f"MPI says: {text}"
            if self.write and code == errno.EIO:  # Open MPI says this of a full disk, too
                status = os.statvfs(os.path.dirname(self.path) or ".")
                reason += f" ({status.f_bavail * status.f_frsize / 1e6:,.1f} MB are free there)"
            raise OSError(code, reason, self.path) from None



def in_rounds(comm: MPI.Comm, items: Sequence[Any], action: Callable[[Any], None]) -> None:
    """Run a collective `action` over every rank's items, one a round; ranks that have run out take part with None.

    A rank whose action raises OSError goes on taking part with None, so that nobody waits for it; the error is raised
    when all rounds are done. Collective.
    """
    problem: OSError | None = None
    for number in range(comm.allreduce(len(items), MPI.MAX)):
        try:
            action(items[number] if number < len(items) and problem is None else None)
        except OSError as error:
            problem = problem or error
    if problem is not None:
        raise problem
