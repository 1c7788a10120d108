"""Leaving in good order when the scheduler wants the nodes back, or the time is over.

SIGUSR1 and SIGTERM ask for it: the step under way is finished, the ranks agree (a signal may reach one of them, or reach
them in different steps), a checkpoint is written, and all leave with status 75, which says: run the same command again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Preemption:
    """Notes that this rank was asked to leave; a context manager, made by the main thread (elsewhere it notes nothing).

    asked: whether it was. at_once: called when SIGTERM arrives, which may also mean that the launcher has lost another
    rank and is ending this one: then the step is never finished.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self.asked, self.at_once = False, at_once
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.asked else handler)  # asked again while leaving: we are about to

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """May be called by Python's main thread and by the thread that watches signals (mpshard.comm.abort), both."""
        self.asked = True
        if number == signal.SIGTERM:
            self.at_once()
