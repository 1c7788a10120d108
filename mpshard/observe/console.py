"""What the user sees while a job runs: messages, and one progress line. Only rank 0 speaks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_EVERY = 5.0  # seconds between progress lines where the output is no terminal


def launcher_has_terminal() -> bool:
    """Whether a program above this one (mpirun, srun) writes to a terminal, though we write to its pipe.

    Launchers pass on what their ranks print as it comes, so a live line works through them.
    """
    pid = os.getppid()
    for _ in range(4):
        try:
            if os.readlink(f"/proc/{pid}/fd/1").startswith("/dev/pts/"):
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


class Console:
    """Messages and the progress of `total` steps on standard output; silent where `speaks` is False.

    On a terminal one line is redrawn; elsewhere (a log file) a line is printed every few seconds.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.live = speaks and (sys.stdout.isatty() or launcher_has_terminal())
        self.rich = RichConsole(file=sys.stdout, force_terminal=True if self.live else None, highlight=False,
                                soft_wrap=True)
        self.progress: Progress | None = None
        self.task: TaskID | None = None

    def say(self, text: str = "") -> None:
        """Print one line as it is, above the progress line."""
        if self.speaks:
            self.rich.print(escape(text))

    def start(self, total: int, done: int = 0) -> None:
        """Begin to show progress, with `done` of `total` steps behind us."""
        self.total, self.begun, self.begun_at, self.printed = total, time.monotonic(), done, 0.0
        if self.live:
            self.progress = Progress(
                TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=24),
                TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s "), TextColumn("left"), TimeRemainingColumn(),
                console=self.rich, transient=True)
            self.task = self.progress.add_task("train", total=total, completed=done, loss="-", rate="-")
            self.progress.start()

    def advance(self, step: int, loss: float, tokens_per_s: float) -> None:
        """`step` steps are done."""
        if not self.speaks:
            return
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=step, loss=f"{loss:.4f}", rate=f"{tokens_per_s:,.0f}")
            return
        now = time.monotonic()
        if now - self.printed >= LINE_EVERY or step == self.total:
            self.printed = now
            left = (now - self.begun) / max(1, step - self.begun_at) * (self.total - step)
            self.say(f"step {step}/{self.total}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  "
                     f"left {int(left) // 60}:{int(left) % 60:02d}")

    def stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
