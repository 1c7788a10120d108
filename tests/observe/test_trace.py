"""Spans, lanes and the file's format, from made-up spans; and the trace of real steps on 1 and 2 ranks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.models import GPT2Config, gpt2
from mpshard.observe.trace import RankTrace, Recorder, Span, Track, lanes, trace_events, write_trace
from mpshard.shard.grouping import group, stages_of
from mpshard.shard.schedule import Backward, Forward, Gather, Reduce, Step, training_program
from tests.launch import launch

MODEL = ["model.n_layers=2", "model.d_model=16", "model.n_heads=2", "data.seq_len=8"]


def apart_or_inside(spans: list[tuple[float, float]]) -> bool:
    return all(a[1] <= b[0] or b[1] <= a[0] or (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
               for i, a in enumerate(spans) for b in spans[i + 1:])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_spans_of_a_lane_nest(pairs):
    spans = [Span(Track.GATHER, "g", min(pair), max(pair), {}) for pair in pairs]
    dealt = lanes(spans)
    assert sorted((s.start, s.end) for lane in dealt for s in lane) == sorted((s.start, s.end) for s in spans)
    assert all(apart_or_inside([(s.start, s.end) for s in lane]) for lane in dealt)


def test_overlapping_flights_go_to_two_tracks_of_one_name():
    rank = RankTrace(0, "here", 0.0, [Span(Track.GATHER, "a", 0, 2, {}), Span(Track.GATHER, "b", 1, 3, {})])
    spans = [event for event in trace_events([rank]) if event["ph"] == "X"]
    names = [event["args"]["name"] for event in trace_events([rank]) if event["name"] == "thread_name"]
    assert len({event["tid"] for event in spans}) == 2 and names == ["gather in flight"] * 2


def test_clocks_are_laid_over_each_other():
    ranks = [RankTrace(0, "a", 0.0, [Span(Track.STEP, "step 1", 5.0, 6.0, {})]),
             RankTrace(1, "b", -95.0, [Span(Track.STEP, "step 1", 100.5, 101.0, {})])]  # its clock is 95 s ahead
    starts = {event["pid"]: event["ts"] for event in trace_events(ranks) if event["ph"] == "X"}
    assert starts == {0: 0.0, 1: 500_000.0}


def test_a_flight_bears_its_instructions_index():
    trace = RankTrace(0, "here", 0.0)
    recorder = Recorder(trace, memory=lambda: {"gathered": 7}, step=lambda: 3)
    recorder.ran(0, Gather("layers.0"), 0.0, 0.1)
    recorder.ran(1, Forward("layers.0", 0), 0.1, 0.2)
    recorder.gathered("layers.0", 0.0, 0.15)
    (flight,) = [span for span in trace.spans if span.track is Track.GATHER]
    assert flight.name == "Gather layers.0" and flight.arguments.items() >= {"step": 3, "index": 0, "unit": "layers.0"}.items()
    assert trace.memory == [(0.1, {"gathered": 7})]  # unchanged since: no second entry


def test_the_file_is_json(tmp_path):
    write_trace(tmp_path / "trace.json", [RankTrace(0, "here", 0.0, [Span(Track.STEP, "step 1", 0, 1, {})])])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transport", ["mpi", "shm"])
def test_real_steps(tmp_path, ranks, transport):
    empty = tmp_path / "empty.toml"
    empty.touch()
    done = launch(ranks, ["-m", "mpshard", "train", str(empty), *MODEL, f"run.dir={tmp_path}", "run.trace=true", "run.trace_steps=2",
                          "train.steps=3", "train.global_batch_size=4", "train.micro_batch_size=1", "train.eval_batches=2",
                          f"shard.transport={transport}", "shard.prefetch=2"])
    assert done.returncode == 0, done.report()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    model = gpt2(GPT2Config(n_layers=2, d_model=16, n_heads=2, vocab_size=256, max_seq_len=8))
    program = training_program(stages_of(model, group(model)), micro_batches=4 // ranks, prefetch=2,
                               weights_last=transport == "mpi" and ranks > 1)
    assert {event["pid"] for event in events} == set(range(ranks))
    for rank in range(ranks):
        mine = [event for event in spans if event["pid"] == rank]
        check_counts(mine, program)
        tracks = {event["tid"] for event in mine}
        for track in tracks:
            assert apart_or_inside([nanoseconds(event) for event in mine if event["tid"] == track])
        counters = [event for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert max(event["args"]["parameter"] for event in counters) > 0


def check_counts(spans: list[dict[str, Any]], program: tuple[Any, ...]) -> None:
    """Two steps of `program`, each instruction once, each flight once, each in its place."""
    seen = Counter(event["name"].split()[0] for event in spans if event["cat"] == "compute")
    expected = Counter(type(instruction).__name__ for instruction in program)
    del seen["optimizer"]
    assert seen == {name: 2 * count for name, count in expected.items()}
    for category, kind in (("gather", Gather), ("reduce", Reduce)):
        flights = [event for event in spans if event["cat"] == category]
        assert len(flights) == 2 * sum(isinstance(instruction, kind) for instruction in program)
        assert all(program[event["args"]["index"]] == kind(**fields(event)) for event in flights)
    for event in spans:
        if event["cat"] == "compute" and event["name"] != "optimizer":
            assert type(program[event["args"]["index"]]).__name__ == event["name"].split()[0]
        if event["cat"] != "step":  # all that happens lies in its step
            (step,) = [s for s in spans if s["cat"] == "step" and s["args"]["step"] == event["args"]["step"]]
            assert step["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1
    assert {type(i) for i in program} >= {Forward, Backward, Step}


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end, in whole numbers: the file has microseconds with three decimals."""
    start = round(1000 * event["ts"])
    return start, start + round(1000 * event["dur"])


def fields(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event["args"].items() if name not in ("step", "index")}
