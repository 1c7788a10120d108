"""`mpshard launch`: start a training job, and start it again from its last checkpoint when it fails.

What counts as success is the marker that the run leaves, not an exit status: launchers have been seen to end with 0 after
a job was cut in two. Imports no MPI.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mpshard.config import ConfigError, load
from mpshard.recover import leftovers
from mpshard.recover.mpiexec import plan_here
from mpshard.recover.status import REQUEUE

TOKEN = "MPSHARD_LAUNCH"  # in the environment of all processes of an attempt
STUCK = 2  # restarts in a row without a new checkpoint, after which another one would not help either
PATIENCE = 2.0  # seconds that ranks may outlive their launcher
LAUNCHERS_TIME = 15.0  # seconds that a launcher has once a rank has said why the job ends: one that is cut off waits for ever
LOOK_EVERY = 3.0  # seconds between looks at which ranks there are
INTERRUPTED = "mpshard: interrupted"  # what a rank says that gets SIGINT before it has a world
REFUSED = 2  # the status for what the user must change

_OF_RANK = re.compile(r"\[rank \d+ of \d+\] (?! )")  # a rank's line that is no frame of a traceback
_OF_LAUNCHER = re.compile(r"EXIT STRING|exited on|signal \d+ \(|KILLED|Segmentation", re.IGNORECASE)


@dataclass(frozen=True)
class Attempt:
    """How a job ended. said: the last lines of its standard error. asked: we told it to leave, by this signal."""

    status: int
    said: tuple[str, ...]
    asked: int = 0

    @property
    def refused(self) -> bool:
        """Whether the user must change something. (A status of 2 alone may be MPICH's word for a rank ended by signal 2.)"""
        return self.status == REFUSED and any(line.startswith("mpshard: ") and line != INTERRUPTED for line in self.said)


def supervise(n: int, hosts: str, words: Sequence[str], max_restarts: int) -> int:
    """Run `mpshard WORDS` (a train command) on `n` ranks until it is done, cannot go on, or asks to be requeued; the exit
    status. Raises ConfigError for what the user must change."""
    folder = run_directory(words)
    start = plan_here(n, hosts, words, os.environ)
    for notice in start.notices:
        tell(notice)
    stuck = restarts = 0
    while True:
        (folder / "done.json").unlink(missing_ok=True)
        before = last_step(folder)
        attempt = run(start.command + (["run.resume=auto"] if restarts else []), start.env, ranks_here=0 if hosts else n)
        if (folder / "done.json").exists():
            return 0
        reason = f"status {attempt.status}: {cause(attempt.said)}"
        if attempt.status == REQUEUE or attempt.refused or attempt.asked:
            return attempt.status or 128 + attempt.asked
        if last_event(folder) == "stop":
            return attempt.status or 1
        step = last_step(folder)
        stuck = 0 if step > before else stuck + (restarts > 0)
        if stuck == STUCK:
            tell(f"gave up: {STUCK} restarts made no progress beyond step {max(step, 0)}; the last ended with {reason}")
            return attempt.status or 1
        if restarts == max_restarts:
            tell(f"ended with {reason}" + (f"; gave up after {restarts} restarts (--max-restarts)" if restarts else ""))
            return attempt.status or 1
        restarts += 1
        tell(f"ended with {reason}; restart {restarts} of {max_restarts} from step {max(step, 0)}")


def run_directory(words: Sequence[str]) -> Path:
    """Where a train command's run will be."""
    if len(words) < 2 or words[0] != "train":
        raise ConfigError("after -- comes a train command: mpshard launch -n 4 -- train CONFIG.toml [section.key=value ...]")
    return Path(load(words[1], words[2:]).run.dir)


def run(command: Sequence[str], env: dict[str, str], ranks_here: int = 0) -> Attempt:
    """Start a job, pass on what it says and what we are told, wait for its end, clear up after it.

    ranks_here: how many ranks this machine must have; 0: unknown. MPICH's launcher does not mind when one leaves that has
    not started MPI yet (an interrupted interpreter does), and the others wait for it.
    """
    token = f"{TOKEN}={secrets.token_hex(8)}"
    segments = leftovers.segments()
    said: deque[str] = deque(maxlen=200)
    asked: list[int] = []
    last_words: list[float] = []  # when ranks said that they end the job
    # A session of its own: Ctrl-C must reach the job once, through us. Standard output stays the terminal's.
    job = subprocess.Popen(command, env=env | dict([token.split("=")]), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                           text=True, errors="replace", start_new_session=True)

    def listen() -> None:
        for line in job.stderr or ():
            said.append(line.rstrip("\n"))
            if _OF_RANK.match(line):
                last_words.append(time.monotonic())
            sys.stderr.write(line)
            sys.stderr.flush()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        # Launchers answer SIGTERM by killing; SIGUSR1 they pass on, and the ranks leave in good order.
        with suppress(ProcessLookupError):
            job.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        looked = complete = time.monotonic()
        while (status := job.poll()) is None:
            now = time.monotonic()
            if now - looked > LOOK_EVERY:
                looked, complete = now, now if len(leftovers.ranks(token)) >= ranks_here else complete
            silent = now - complete > LAUNCHERS_TIME
            if silent or (last_words and now - last_words[0] > LAUNCHERS_TIME):
                tell("a rank has left and the launcher has not noticed: ended" if silent else
                     "the launcher does not end (it cannot reach a host?): ended")
                leftovers.end(token, patience=0.0)
            time.sleep(0.05)
    finally:
        left = leftovers.end(token, PATIENCE)
        job.wait()
        listener.join(PATIENCE)
        for number, handler in before.items():
            signal.signal(number, handler)
        leftovers.remove_segments(segments)
    if left:
        tell(f"{left} processes had outlived the job and were ended")
    return Attempt(status if status >= 0 else 128 - status, tuple(said), asked[-1] if asked else 0)


def cause(said: Iterable[str]) -> str:
    """The one line of a job's last words that says most: a rank's, else the launcher's."""
    lines = [line.strip() for line in said if line.strip()]
    tests: tuple[Callable[[str], object], ...] = (_OF_RANK.match, lambda line: line.startswith("mpshard: "), _OF_LAUNCHER.search)
    for test in tests:
        if found := [line for line in lines if test(line)]:
            return found[-1]
    return lines[-1] if lines else "no rank could say why (killed from outside?)"


def last_step(folder: Path) -> int:
    """The step of the latest checkpoint; -1 without one. (The room of checkpoints cannot be asked: it would start MPI.)"""
    try:
        return int(os.readlink(folder / "checkpoints" / "latest").removeprefix("step-"))
    except (OSError, ValueError):
        return -1


def last_event(folder: Path) -> str:
    """The event that the last line of metrics.jsonl tells of, if it does."""
    try:
        return str(json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]).get("event", ""))
    except (OSError, ValueError, IndexError, AttributeError):
        return ""


def tell(text: str) -> None:
    print(f"mpshard launch: {text}", file=sys.stderr, flush=True)
