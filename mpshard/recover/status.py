"""How a run ends before its last step, other than by failing: with one line, on all ranks together, and a status."""

from __future__ import annotations

STOPPED = 1  # the guard's verdict
STALLED = 1  # the watchdog's
REQUEUE = 75  # asked to leave, a checkpoint is written: start the same command again (EX_TEMPFAIL of BSD's sysexits.h)


class Ended(Exception):
    """Raised on every rank in the same step: the command says `text` once and exits with `status`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text
