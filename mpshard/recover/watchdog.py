"""A job that stalls is ended, and says which rank is where.

MPI waits for ever: for a rank that computes for ever, one that is stopped, and one behind a cut cable (measured: both
libraries say nothing). So every instruction has a deadline. A thread looks whether the rank gets on; when it has not for
too long, it writes down where the rank is, reads what the others wrote, says so and ends the job. It calls nothing of
MPI but, at the very end, MPI_Abort, and whatever may hang has somebody who does not wait for it.

Note on places. All ranks run the same program, so the number of instructions begun, with the steps of the loop around
it, orders ranks: whoever is behind keeps the others waiting, and who is in front of him only waits. When all are at the
same place, nobody is to blame but what lies between them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mpshard.comm import abort
from mpshard.comm.agree import on_root
from mpshard.recover.status import STALLED

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpshard.shard.engine import Engine

FLOOR = 60.0  # seconds that an instruction has at least, if nobody says
STEPS = 20  # of the longest steps so far: what an instruction has above that
OUTSIDE = 10  # times as long as an instruction: what lies between steps (start, checkpoints), if nobody says
LEAVING = 8.0  # seconds once the job has been told to leave
LONG = 2.0  # seconds without progress that deserve a line once they are over
BOARD = "stalled"  # folder in the run directory


@dataclass(frozen=True)
class Place:
    """Where a rank is. done: what it has begun so far, the same sequence on all ranks. waits: for others."""

    rank: int
    host: str
    step: int
    done: int
    what: str
    waits: bool
    stacks: str = ""

    @property
    def words(self) -> str:
        return f"at step {self.step}, {self.what}" if self.step else f"at {self.what}"


class Watchdog:
    """Watches this rank from a thread; a context manager.

    Parameters
    ----------
    comm: the ranks of the job; collective. folder: the run directory. timeout: as run.timeout, seconds.
    say: prints a line (on one rank).
    """

    def __init__(self, comm: MPI.Comm, folder: Path, timeout: float = 0.0, say: Callable[[str], None] = lambda line: None) -> None:
        self.comm, self.board, self.timeout, self.say = comm, folder / BOARD, timeout, say
        self.engine: Engine | None = None
        self.step, self.marks, self.phase, self.waits = 0, 0, "the start", False
        self.longest, self.recent = 0.0, deque[float](maxlen=32)
        self.leaving = False
        self._over = threading.Event()
        on_root(comm, lambda: shutil.rmtree(self.board, ignore_errors=True))
        self._thread = threading.Thread(target=self._watch, name="mpshard-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    # -- told by the rank --------------------------------------------------------------------
    def at(self, phase: str, step: int | None = None, waits: bool = False) -> None:
        """The rank begins something outside a program. waits: it does nothing there but wait for others."""
        self.marks, self.phase, self.waits = self.marks + 1, phase, waits
        if step is not None:
            self.step = step

    def took(self, seconds: float) -> None:
        """A step is over."""
        self.longest = max(self.longest, seconds)
        self.recent.append(seconds)

    def hurry(self) -> None:
        """The job has been told to leave, perhaps because another rank is dead: an instruction has little time now."""
        self.leaving = True

    # -- asked by the thread -----------------------------------------------------------------
    @property
    def done(self) -> int:
        return self.marks + (self.engine.begun if self.engine is not None else 0)

    def limit(self) -> float:
        """Seconds that the rank may stay where it is."""
        quick = self.waits or (self.engine is not None and self.engine.doing is not None)
        limit = self.timeout or max(FLOOR, STEPS * self.longest) * (1 if quick else OUTSIDE)
        return min(limit, max(LEAVING, 3 * self.longest)) if self.leaving and quick else limit

    def place(self, stacks: str = "") -> Place:
        """Where the rank is now."""
        doing = None if self.engine is None else self.engine.doing
        waits_for = "" if self.engine is None else self.engine.waits_for
        what = self.phase if doing is None else waits_for or describe(doing)
        waits = self.waits if doing is None else bool(waits_for)
        return Place(self.comm.rank, socket.gethostname(), self.step, self.done, what, waits, stacks)

    def _watch(self) -> None:
        seen, still, tick = -1, 0.0, 0.0
        before = time.monotonic()
        stood = self.place()
        while not self._over.wait(tick):
            now = time.monotonic()
            limit = self.limit()
            # A suspended job (SIGSTOP and SIGCONT of a scheduler) has slept, not stalled: a long night counts as one tick.
            passed, before = min(now - before, 2 * tick), now
            tick = min(1.0, limit / 10)
            # If this thread itself gets no turn, because something holds the interpreter's lock, C code ends the process.
            with suppress(OSError, ValueError, AttributeError, RuntimeError):
                faulthandler.dump_traceback_later(2 * limit + 10, exit=True, file=sys.__stderr__ or 2)
            if self.done != seen:
                if stood.waits and still > max(LONG, 4 * statistics.median(self.recent or [0.0])):
                    self.say(f"{stood.words}: nothing came for {still:.1f} s, now it goes on")
                seen, still = self.done, 0.0
                continue
            still, stood = still + passed, self.place()
            if still > limit:
                self._end(still)

    def _end(self, still: float) -> None:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = "\n".join(f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames.items()
                           if ident != threading.get_ident())
        mine = self.place(stacks)
        found = {mine.rank: mine}
        patience = min(10.0, max(2.0, self.limit() / 4))

        def exchange() -> None:  # in a thread of its own: the file system may be what hangs
            with suppress(OSError):
                self.board.mkdir(exist_ok=True)
                write(self.board, mine)
                end = time.monotonic() + patience
                while len(found) < self.comm.size and time.monotonic() < end:
                    found.update(read(self.board))
                    time.sleep(0.1)

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(patience + 2)
        places = dict(found)
        time.sleep(min(3.0, 0.5 * sorted(places).index(mine.rank)))  # one speaks; the others, if it cannot
        before = "asked to leave, but " if self.leaving else ""
        told = sentence(list(places.values()), self.comm.size)
        abort.stop(self.comm, f"{before}stalled for {still:.0f} s: {told}; more in {self.board}", STALLED)


def describe(instruction: object) -> str:
    """Forward layers.4, micro-batch 1"""
    values = asdict(instruction)  # type: ignore[call-overload]
    name = " ".join([type(instruction).__name__, *(str(value) for value in [*values.values()][:1])])
    return f"{name}, micro-batch {values['micro_batch']}" if "micro_batch" in values else name


def sentence(places: Sequence[Place], world: int) -> str:
    """Who is where, whoever is behind first: "rank 3 (h1) is at step 12, Forward layers.4; 5 others wait in Gather layers.5"."""
    groups: dict[tuple[int, int, str, bool], list[Place]] = {}
    for place in sorted(places, key=lambda p: (p.done, p.rank)):
        groups.setdefault((place.done, place.step, place.what, place.waits), []).append(place)
    if len(groups) == 1 and len(places) == world > 1:
        where = f"{'wait' if places[0].waits else 'are'} {places[0].words}"
        return f"all ranks {where}" + ("; none is behind, so what lies between them does not work" if places[0].waits else "")
    silent = sorted(set(range(world)) - {place.rank for place in places})
    parts = [f"{_ranks(silent)} did not answer (stopped, dead or cut off)"] if silent else []
    step = None
    for (_, at, what, waits), group in groups.items():
        one = len(group) == 1
        hosts = {place.host for place in group}
        who = (f"{len(group)} other{'' if one else 's'}" if parts else
               _ranks([p.rank for p in group]) + (f" ({group[0].host})" if len(hosts) == 1 else ""))
        verb = ("waits" if one else "wait") if waits else ("is" if one else "are")
        parts.append(f"{who} {verb} {f'in {what}' if at == step else group[0].words}")
        step = at
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" + (", ..." if len(ranks) > 8 else "")


def write(board: Path, place: Place) -> None:
    """Put a place onto the board, whole or not at all."""
    path = board / f"rank-{place.rank:05}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(place), indent=1), encoding="utf-8")
    os.replace(partial, path)


def read(board: Path) -> dict[int, Place]:
    """All places on the board."""
    places = (Place(**json.loads(path.read_text(encoding="utf-8"))) for path in board.glob("rank-*.json"))
    return {place.rank: place for place in places}
