"""Programs for devices: gathers and reduces start one use later, behind work that the device has been given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.shard.schedule import (
    Backward,
    Fetch,
    Finish,
    Forward,
    Free,
    Gather,
    Offload,
    Reduce,
    Release,
    Stay,
    forward_program,
    full_slots,
    gradient_slots,
    training_program,
)
from tests.shard.test_schedule import chains, stages, untied, words

cases = st.tuples(chains(), st.integers(1, 3), st.integers(0, 9), st.sampled_from(Stay), st.booleans())


def test_the_walk_of_the_design_with_lag():
    assert words(training_program(stages(2), micro_batches=1, prefetch=1, lag=1)) == [
        "Gather embed",
        "Forward embed", "Gather block0", "Free embed",
        "Forward block0", "Gather block1", "Free block0",
        "Forward block1", "Gather head", "Free block1",
        "Forward head",
        "Backward head", "Gather block1", "Free head",
        "Backward block1", "Gather block0", "Reduce head", "Free block1",
        "Backward block0", "Reduce block1", "Free block0",
        "Finish head",
        "Backward embed", "Reduce block0",
        "Reduce embed",
        "Finish block1", "Finish block0", "Finish embed",
        "Step",
    ]


def test_the_walk_with_activations_that_go_and_come_back():
    program = training_program(stages(2), micro_batches=1, prefetch=1, lag=1, offload=True)
    assert words(i for i in program if not isinstance(i, Gather | Free | Reduce | Finish)) == [
        "Forward embed", "Offload embed",
        "Forward block0", "Release embed", "Offload block0",
        "Forward block1", "Release block0",  # its own would be back before they have left
        "Forward head",
        "Backward head",
        "Fetch block0", "Backward block1",
        "Fetch embed", "Backward block0",
        "Backward embed",
        "Step",
    ]


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_slots_with_lag(prefetch):
    chain, sizes = stages(8), dict.fromkeys(["embed", "head", *(f"block{i}" for i in range(8))], 64)
    program = training_program(chain, 2, prefetch, lag=1)
    assert full_slots(program, sizes).sizes == (64,) * (prefetch + 1)  # as without lag
    assert gradient_slots(program, chain, sizes).sizes == (64,) * 3  # one that backward writes, one complete, one reduced


def test_a_gather_never_takes_the_slot_of_the_use_before_it():
    """The device is still reading that one when the host starts the gather."""
    chain, sizes = stages(8), dict.fromkeys(["embed", "head", *(f"block{i}" for i in range(8))], 64)
    program = training_program(chain, 1, 1, lag=1)
    taken, reading, slots = {}, set(), full_slots(program, sizes).taken
    for index, instruction in enumerate(program):
        if isinstance(instruction, Forward | Backward):
            reading = {taken[unit] for unit in taken if unit == instruction.stage}
        elif isinstance(instruction, Gather):
            assert slots[index] not in reading
            taken[instruction.unit] = slots[index]


def test_other_lags_are_refused():
    with pytest.raises(ValueError, match="lag=2"):
        training_program(stages(1), 1, 1, lag=2)


@given(cases)
def test_a_lagging_program_is_the_same_work_in_another_order(case):
    chain, micro_batches, prefetch, stay, once = case
    plain, lagging = (training_program(chain, micro_batches, prefetch, stay, once, lag) for lag in (0, 1))
    for kind in (Forward | Backward, Gather, Free, Reduce, Finish):
        ours, theirs = ([i for i in program if isinstance(i, kind)] for program in (lagging, plain))
        assert sorted(map(repr, ours)) == sorted(map(repr, theirs))
    assert [i for i in lagging if isinstance(i, Forward | Backward)] == [i for i in plain if isinstance(i, Forward | Backward)]


@given(cases)
def test_a_lagging_program_reads_what_is_there(case):
    chain, micro_batches, prefetch, stay, once = case
    by_name = {stage.name: stage for stage in chain}
    for program in (training_program(chain, micro_batches, prefetch, stay, once, 1), forward_program(chain, prefetch, 1)):
        resident, gradients, peak = set(), {}, 0
        for instruction in program:
            match instruction:
                case Gather(unit):
                    assert unit not in resident
                    resident.add(unit)
                case Free(unit):
                    resident.remove(unit)
                case Forward(stage, _):
                    assert resident >= set(by_name[stage].reads)
                case Backward(stage, _):
                    assert resident >= set(by_name[stage].backward_reads)
                    for unit in by_name[stage].gradients:
                        assert gradients.setdefault(unit, "open") == "open"
                    peak = max(peak, len(gradients))
                case Reduce(unit, _):
                    assert gradients[unit] == "open"
                    gradients[unit] = "reducing"
                case Finish(unit, _):
                    assert gradients.pop(unit) == "reducing"
            if untied(chain) and stay is Stay.USE:
                assert len(resident) <= prefetch + 1
        assert not resident and not gradients
        assert peak <= 3 or once or not untied(chain)


@given(cases)
def test_what_goes_to_the_host_comes_back_before_it_is_read(case):
    chain, micro_batches, prefetch, stay, once = case
    program = training_program(chain, micro_batches, prefetch, stay, once, 1, offload=True)
    assert [i for i in program if not isinstance(i, Offload | Release | Fetch)] == list(
        training_program(chain, micro_batches, prefetch, stay, once, 1))
    state, since = {}, {}
    for instruction in program:
        match instruction:
            case Forward(stage, mb):
                state[stage, mb] = "made"
            case Offload(stage, mb):
                assert state[stage, mb] == "made"
                state[stage, mb] = "leaving"
            case Release(stage, mb):
                assert state[stage, mb] == "leaving"
                state[stage, mb] = "away"
            case Fetch(stage, mb):
                assert state[stage, mb] == "away"
                state[stage, mb] = "coming"
            case Backward(stage, mb):
                assert state.pop((stage, mb)) in ("made", "coming")
        if isinstance(instruction, Forward | Backward):
            for key, value in state.items():  # a copy has a use to hide behind, and no more
                since[key, value] = since.get((key, value), 0) + 1
                assert since[key, value] <= 1 or value not in ("leaving", "coming")
    assert set(state.values()) <= {"made"}  # of stages before the first that learns


@given(cases)
def test_a_reduce_starts_behind_the_next_use(case):
    chain, micro_batches, prefetch, stay, once = case
    program = training_program(chain, micro_batches, prefetch, stay, once, 1)
    uses = [i for i in program if isinstance(i, Forward | Backward)]
    issued, last = 0, {}
    by_name = {stage.name: stage for stage in chain}
    for instruction in program:
        if isinstance(instruction, Forward | Backward):
            issued += 1
            if isinstance(instruction, Backward):
                last |= dict.fromkeys(by_name[instruction.stage].gradients, issued)
        elif isinstance(instruction, Reduce):
            assert issued == len(uses) or issued > last[instruction.unit]
