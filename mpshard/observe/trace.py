"""trace.json: what every rank did when, in the Trace Event Format that Perfetto and chrome://tracing draw.

Open it at https://ui.perfetto.dev. A rank is a process; its tracks are the step, the program's instructions, the waits,
the gathers and the reduces in flight, and a counter of the bytes held, by kind. A span bears the instruction's name
("Gather layers.3"); its step, its index in the program and its fields are its arguments.

Format: "Trace Event Format" (Google, 2016), complete events (X), counters (C) and metadata (M); times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Track(Enum):
    """Where a span is drawn, from top to bottom."""

    STEP = "step"
    COMPUTE = "compute"
    WAIT = "wait"
    GATHER = "gather in flight"
    REDUCE = "reduce in flight"


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds of the rank's own clock."""

    track: Track
    name: str
    start: float
    end: float
    arguments: dict[str, Any]


@dataclass
class RankTrace:
    """All that one rank saw.

    offset: seconds that turn its clock into rank 0's. memory: (time, bytes by kind), one entry a change.
    """

    rank: int
    host: str
    offset: float
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)


class Recorder:
    """Collects a rank's spans; an observer of the engine (see mpshard.shard.observer).

    memory: the bytes now held, by kind; asked after every instruction. step: the number of the step under way.
    """

    def __init__(self, trace: RankTrace, memory: Callable[[], dict[str, int]], step: Callable[[], int]) -> None:
        self.trace, self.memory, self.step = trace, memory, step
        self._begun: dict[str, dict[str, Any]] = {}  # arguments of the last instruction of a name
        self._update_begun, self._update_index = 0.0, 0

    def ran(self, index: int, instruction: Any, start: float, end: float) -> None:
        fields = asdict(instruction)
        if not fields:  # the optimizer's: it ends when the step does
            self._update_begun, self._update_index = start, index
            return
        name = f"{type(instruction).__name__} {next(iter(fields.values()))}"
        self._begun[name] = arguments = {"step": self.step(), "index": index, **fields}
        self.trace.spans.append(Span(Track.COMPUTE, name, start, end, arguments))
        held = self.memory()
        if not self.trace.memory or self.trace.memory[-1][1] != held:
            self.trace.memory.append((end, held))

    def gathered(self, unit: str, start: float, end: float) -> None:
        self._flight(Track.GATHER, f"Gather {unit}", start, end)

    def reduced(self, unit: str, start: float, end: float) -> None:
        self._flight(Track.REDUCE, f"Reduce {unit}", start, end)

    def waited(self, unit: str, start: float, end: float) -> None:
        self.trace.spans.append(Span(Track.WAIT, f"wait {unit}", start, end, {"step": self.step(), "unit": unit}))

    def step_done(self, step: int, start: float, updating: float, end: float) -> None:
        """A whole step is over: begun at `start`, the optimizer's own work at `updating`."""
        arguments = {"step": step}
        self.trace.spans += [
            Span(Track.STEP, f"step {step}", start, end, arguments),
            Span(Track.COMPUTE, "Step", self._update_begun, end, arguments | {"index": self._update_index}),
            Span(Track.COMPUTE, "optimizer", updating, end, arguments)]

    def _flight(self, track: Track, name: str, start: float, end: float) -> None:
        self.trace.spans.append(Span(track, name, start, end, self._begun.get(name, {"step": self.step()})))


def trace_events(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """The events of all ranks, on rank 0's clock, the first at time 0.

    Flights of one kind may overlap without one lying inside the other, which a track cannot show: those that do go to
    further tracks of the same name.
    """
    starts = [span.start + rank.offset for rank in ranks for span in rank.spans]
    zero = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        def nanoseconds(time: float, offset: float = rank.offset) -> int:
            return round((time + offset - zero) * 1e9)

        events.append({"ph": "M", "pid": rank.rank, "name": "process_name", "args": {"name": f"rank {rank.rank} ({rank.host})"}})
        events.append({"ph": "M", "pid": rank.rank, "name": "process_sort_index", "args": {"sort_index": rank.rank}})
        number = 0
        for track in Track:
            for lane in lanes([span for span in rank.spans if span.track is track]):
                about = {"pid": rank.rank, "tid": number}
                events.append({"ph": "M", **about, "name": "thread_name", "args": {"name": track.value}})
                events.append({"ph": "M", **about, "name": "thread_sort_index", "args": {"sort_index": number}})
                events += [{"ph": "X", **about, "name": span.name, "cat": track.name.lower(),
                            "ts": nanoseconds(span.start) / 1000, "args": span.arguments,
                            "dur": (nanoseconds(span.end) - nanoseconds(span.start)) / 1000} for span in lane]
                number += 1
        events += [{"ph": "C", "pid": rank.rank, "name": "memory, bytes", "ts": nanoseconds(time) / 1000, "args": held}
                   for time, held in rank.memory]
    return events


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans dealt to as few lanes as needed for any two of a lane to be apart or one inside the other."""
    dealt: list[list[Span]] = []
    open_spans: list[list[Span]] = []  # of each lane, those that a new span could still lie in
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for enclosing in open_spans:
            while enclosing and enclosing[-1].end <= span.start:
                enclosing.pop()
        fits = (lane for lane, enclosing in enumerate(open_spans) if not enclosing or span.end <= enclosing[-1].end)
        number = next(fits, len(dealt))
        if number == len(dealt):
            dealt.append([])
            open_spans.append([])
        dealt[number].append(span)
        open_spans[number].append(span)
    return dealt


def write_trace(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Write one file of all ranks. OSError if it cannot be written."""
    about = {"ranks": len(ranks), "clock_offsets_s": [rank.offset for rank in ranks]}
    document = {"traceEvents": trace_events(ranks), "displayTimeUnit": "ms", "otherData": about}
    path.write_text(json.dumps(document), encoding="utf-8")
