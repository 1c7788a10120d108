"""What the user sees while a job runs: messages, and one progress line. Only rank 0 speaks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

from mpshard import launcher

LINE_EVERY = 5.0  # seconds between progress lines where the output is no terminal
REDRAW_EVERY = 0.2  # seconds between updates of the live line
# Programs between a user's terminal and a rank, by their names in /proc (15 characters at most).
LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr", "prterun", "prte", "prted", "orterun", "orted",
             "srun"}


def terminal() -> str | None:
    """The device of the terminal that shows our standard output, None if it goes elsewhere.

    A launcher puts a pipe (Open MPI: a pseudo-terminal, even where the job's output goes to a file) between a rank
    and itself, and passes on what comes as it comes. So under one its own output counts: then a live line works.
    """
    try:
        if launcher.launched():
            return _launchers_terminal()
        return os.ttyname(sys.stdout.fileno())
    except (OSError, ValueError):
        return None


def _launchers_terminal() -> str | None:
    pid, output = os.getppid(), None
    for _ in range(8):  # the shell of `mpirun sh -c ...` may lie between
        name, parent = _process(pid)
        if name in LAUNCHERS:
            output = os.readlink(f"/proc/{pid}/fd/1")  # the uppermost one's is what counts
        elif output is not None:
            break
        pid = parent
    return output if output is not None and output.startswith(("/dev/pts/", "/dev/tty")) else None


def _process(pid: int) -> tuple[str, int]:
    """Name and parent of a process."""
    before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])


def width_of(device: str) -> int | None:
    """Columns of a terminal, None if it does not say."""
    try:
        with open(device, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOCTTY)) as file:
            return os.get_terminal_size(file.fileno()).columns or None
    except OSError:
        return None


class _Rich(RichConsole):
    def on_broken_pipe(self) -> None:
        raise  # called while the error is handled; what it means is the caller's to decide


class Console:
    """Messages and the progress of `total` steps on standard output; silent where `speaks` is False.

    On a terminal one line is redrawn; elsewhere (a log file) a line is printed every few seconds.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        device = terminal() if speaks and os.environ.get("TERM", "dumb") != "dumb" else None
        self.live = device is not None
        self.rich = _Rich(file=sys.stdout, force_terminal=self.live, width=width_of(device) if device else None,
                          highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.progress: Progress | None = None

    def say(self, text: str = "") -> None:
        """Print lines as they are, above the progress line; control characters, which a model may well invent, as \\x1b."""
        if self.speaks:
            self.rich.print("".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text))

    def start(self, total: int, done: int = 0) -> None:
        """Begin to show progress, with `done` of `total` steps behind us."""
        self.total, self.begun, self.begun_at, self.shown, self.line = total, time.monotonic(), done, -LINE_EVERY, ""
        if self.live and self.speaks:
            bar = BarColumn(bar_width=20, style="dim", complete_style="default", finished_style="default")
            self.progress = Progress(bar, TextColumn("{task.description}"), console=self.rich, transient=True,
                                     auto_refresh=False)  # no thread beside compute
            self.task = self.progress.add_task(f"step {done}/{total}", total=total, completed=done)
            self.progress.start()

    def advance(self, step: int, loss: float, tokens_per_s: float) -> None:
        """`step` steps are done."""
        if not self.speaks:
            return
        now = time.monotonic()
        passed = now - self.begun
        left = passed / max(1, step - self.begun_at) * (self.total - step)
        self.line = f"step {step}/{self.total}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        due = now - self.shown >= (REDRAW_EVERY if self.progress is not None else LINE_EVERY)
        if due or step == self.total:
            self.shown = now
            text = f"{self.line}  left {clock(left)}" if step < self.total else f"{self.line}  took {clock(passed)}"
            if self.progress is not None:
                self.progress.update(self.task, completed=step, description=text, refresh=True)
            else:
                self.say(text)
            self.line = text

    def stop(self) -> None:
        """The last state of the live line stays, as an ordinary one."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            self.say(self.line)


def clock(seconds: float) -> str:
    """Minutes and seconds, and hours if there are any: 4:05, 1:00:00."""
    minutes, whole = divmod(int(seconds), 60)
    return f"{minutes}:{whole:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{whole:02d}"
