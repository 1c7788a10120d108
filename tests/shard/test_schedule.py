"""The program of a step, asserted as a list; no arrays, no MPI."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.shard.grouping import group, stages_of
from mpshard.shard.schedule import (
    Backward,
    Finish,
    Forward,
    Free,
    Gather,
    Program,
    Reduce,
    Stage,
    Stay,
    Step,
    Weights,
    forward_program,
    full_slots,
    gradient_slots,
    served,
    training_program,
)


def stages(blocks: int, tied: bool = False, embed_backward_reads: bool = False) -> list[Stage]:
    """embed, block0 ..., head, each a unit of its own; tied: the head reads embed's unit too."""
    head = ("embed", "head") if tied else ("head",)
    own = [(f"block{i}",) for i in range(blocks)]
    return [Stage("embed", ("embed",), ("embed",) if embed_backward_reads else (), ("embed",)),
            *(Stage(name, unit, unit, unit) for unit in own for name in unit),
            Stage("head", head, head, head)]


def words(program: Program) -> list[str]:
    """One micro-batch's program as short text."""
    return [f"{type(i).__name__} {getattr(i, 'unit', None) or i.stage}" if not isinstance(i, Step) else "Step" for i in program]


def count(program: Program, kind: type) -> Counter[str]:
    return Counter(i.unit for i in program if isinstance(i, kind))


def test_the_walk_of_the_design():
    assert words(training_program(stages(2), micro_batches=1, prefetch=1)) == [
        "Gather embed", "Gather block0",
        "Forward embed", "Free embed", "Gather block1",
        "Forward block0", "Free block0", "Gather head",
        "Forward block1", "Free block1",
        "Forward head", "Gather block1",
        "Backward head", "Free head", "Gather block0", "Reduce head",
        "Backward block1", "Free block1", "Reduce block1",
        "Finish head",
        "Backward block0", "Free block0", "Reduce block0",
        "Finish block1",
        "Backward embed", "Reduce embed",
        "Finish block0", "Finish embed",
        "Step",
    ]


def test_the_walk_with_the_second_stages_weights_last():
    """The first stage's reduce goes while they are made. Only in the step's last micro-batch: else the next forward hides it."""
    program = training_program(stages(2), micro_batches=1, prefetch=1, weights_last=True)
    assert words(program)[words(program).index("Backward block1"):] == [
        "Backward block1", "Free block1", "Reduce block1",
        "Finish head",
        "Backward block0", "Free block0",
        "Finish block1",
        "Backward embed", "Reduce embed",
        "Weights block0", "Reduce block0",
        "Finish embed", "Finish block0",
        "Step",
    ]
    assert [i for i in program if isinstance(i, Backward) and i.inputs_only] == [Backward("block0", 0, inputs_only=True)]
    twice = training_program(stages(2), micro_batches=2, prefetch=1, weights_last=True)
    assert [i for i in twice if isinstance(i, Weights)] == [Weights("block0", 1)]


@pytest.mark.parametrize("chain", [stages(0), stages(1)[1:], [replace(stage, gradients=("all",)) for stage in stages(2)],
                                   [replace(stages(1)[0], gradients=()), *stages(1)[1:]]])
def test_weights_are_not_left_where_nothing_comes_after_them(chain):
    """Too few stages that learn, or one unit for the first two."""
    assert not any(isinstance(i, Weights) for i in training_program(chain, 2, 1, weights_last=True))


def test_reduces_of_a_stage_with_several_units_go_together():
    two = [Stage(f"s{i}", (f"a{i}", f"b{i}"), (f"a{i}", f"b{i}"), (f"a{i}", f"b{i}")) for i in range(3)]
    backward = words(training_program(two, 1, 1))
    assert backward[backward.index("Backward s1") - 2:backward.index("Backward s0")] == [
        "Reduce a2", "Reduce b2", "Backward s1", "Free a1", "Free b1", "Reduce a1", "Reduce b1", "Finish a2", "Finish b2"]


def test_without_prefetch_one_unit_at_a_time():
    assert words(training_program(stages(1), micro_batches=1, prefetch=0)) == [
        "Gather embed", "Forward embed", "Free embed",
        "Gather block0", "Forward block0", "Free block0",
        "Gather head", "Forward head",
        "Backward head", "Free head",
        "Gather block0", "Reduce head", "Backward block0", "Free block0", "Reduce block0",
        "Finish head",
        "Backward embed", "Reduce embed",
        "Finish block0", "Finish embed",
        "Step",
    ]


def test_tied_embeddings_are_reduced_once_after_both_uses():
    program = words(training_program(stages(2, tied=True), micro_batches=1, prefetch=1))
    assert count(training_program(stages(2, tied=True), 1, 1), Reduce) == dict.fromkeys(("embed", "block0", "block1", "head"), 1)
    assert program.index("Reduce embed") > program.index("Backward embed") > program.index("Backward head")
    assert program.index("Reduce head") < program.index("Backward block1")
    assert program.count("Gather embed") == 2  # forward, and once more for the head; kept from there to its backward


@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_counts_at_full_sharding(prefetch, micro_batches):
    """2 gathers and 1 reduce of each unit a micro-batch; 1 gather of the last unit, whose backward follows its forward
    (the more the deeper the prefetch), and of the first, whose backward reads no weights."""
    blocks = 5
    program = training_program(stages(blocks), micro_batches, prefetch)
    names = [stage.name for stage in stages(blocks)]
    assert count(program, Reduce) == count(program, Finish) == dict.fromkeys(names, micro_batches)
    assert count(program, Gather) == count(program, Free)
    if prefetch <= 1:
        twice = {f"block{i}": 2 * micro_batches for i in range(blocks)}
        assert count(program, Gather) == twice | {"embed": micro_batches, "head": micro_batches}
    if prefetch == 100:
        assert count(program, Gather) == dict.fromkeys(names, 1)  # deep enough to keep everything all the time


def test_an_embedding_whose_backward_reads_weights_is_gathered_again():
    program = training_program(stages(2, embed_backward_reads=True), 1, 1)
    assert count(program, Gather)["embed"] == 2


def test_evaluation_gathers_each_unit_once_and_reduces_nothing():
    for prefetch in (0, 1, 2, 100):
        program = forward_program(stages(3), prefetch)
        assert count(program, Gather) == count(program, Free) == {s.name: 1 for s in stages(3)}
        assert not any(isinstance(i, Reduce | Finish | Backward | Step) for i in program)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_equal_units_take_prefetch_plus_one_slots_and_two_gradient_buffers(prefetch):
    chain, sizes = stages(6), {stage.name: 64 for stage in stages(6)}
    program = training_program(chain, 2, prefetch)
    assert full_slots(program, sizes).sizes == (64,) * (prefetch + 1)
    assert gradient_slots(program, chain, sizes).sizes == (64,) * 2  # one that backward writes, one that is reduced


# -- whatever the model -----------------------------------------------------------------------
@st.composite
def chains(draw: st.DrawFn) -> list[Stage]:
    """1 to 7 stages, each with a unit of its own and sometimes an earlier stage's; backward of some reads nothing."""
    chain: list[Stage] = []
    for i in range(draw(st.integers(1, 7))):
        borrowed = draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []
        reads = (*(f"u{j}" for j in borrowed), f"u{i}")
        chain.append(Stage(f"s{i}", reads, reads if draw(st.booleans()) else (), reads))
    return chain


programs = st.tuples(chains(), st.integers(1, 3), st.integers(0, 9))


def untied(chain: list[Stage]) -> bool:
    return all(len(stage.reads) == 1 for stage in chain)


@given(programs)
def test_every_use_finds_its_units_gathered_and_nothing_stays(case):
    chain, micro_batches, prefetch = case
    by_name = {stage.name: stage for stage in chain}
    for program in (training_program(chain, micro_batches, prefetch), forward_program(chain, prefetch)):
        resident: set[str] = set()
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
        assert not resident


@given(programs)
def test_a_gather_serves_the_micro_batches_that_compute_before_its_free(case):
    chain, micro_batches, prefetch = case
    by_name = {stage.name: stage for stage in chain}
    for program in (training_program(chain, micro_batches, prefetch, Stay.MICRO_BATCH), forward_program(chain, prefetch)):
        found = served(program, chain)
        assert set(found) == {index for index, i in enumerate(program) if isinstance(i, Gather)}
        for index, served_ones in found.items():
            unit = program[index].unit
            end = next(k for k in range(index, len(program)) if isinstance(program[k], Free) and program[k].unit == unit)
            users = [i for i in program[index:end] if (isinstance(i, Forward) and unit in by_name[i.stage].reads)
                     or (isinstance(i, Backward) and unit in by_name[i.stage].backward_reads)]
            assert sorted(served_ones) == sorted({i.micro_batch for i in users})


@given(programs)
def test_all_the_compute_is_there_in_its_order(case):
    chain, micro_batches, prefetch = case
    names = [stage.name for stage in chain]
    expected = [use for mb in range(micro_batches)
                for use in [*(Forward(n, mb) for n in names), *(Backward(n, mb) for n in reversed(names))]]
    program = training_program(chain, micro_batches, prefetch)
    assert [i for i in program if isinstance(i, Forward | Backward)] == expected
    assert program[-1] == Step() and program.count(Step()) == 1


@given(programs)
def test_at_most_prefetch_plus_one_stages_units_are_resident(case):
    chain, micro_batches, prefetch = case
    chain = [Stage(s.name, s.reads[-1:], s.backward_reads[-1:], s.gradients[-1:]) for s in chain]
    program = training_program(chain, micro_batches, prefetch)
    resident: set[str] = set()
    for instruction in program:
        resident |= {instruction.unit} if isinstance(instruction, Gather) else set()
        resident -= {instruction.unit} if isinstance(instruction, Free) else set()
        assert len(resident) <= prefetch + 1


@given(programs, st.booleans())
def test_each_gradient_is_reduced_once_and_its_buffer_reopens_only_after(case, weights_last):
    chain, micro_batches, prefetch = case
    by_name = {stage.name: stage for stage in chain}
    last = {(unit, mb): stage.name for mb in range(micro_batches) for stage in reversed(chain) for unit in stage.gradients}
    state: dict[str, str] = {}  # unit: open (backward writes) or reducing
    reduced, peak = Counter(), 0
    for instruction in training_program(chain, micro_batches, prefetch, weights_last=weights_last):
        match instruction:
            case Backward(stage, mb) | Weights(stage, mb):
                for unit in by_name[stage].gradients:
                    assert state.setdefault(unit, "open") == "open"
                left = isinstance(instruction, Backward) and instruction.inputs_only
                done = {(unit, mb) for unit in by_name[stage].gradients if last[unit, mb] == stage and not left}
                peak = max(peak, list(state.values()).count("reducing"))
            case Reduce(unit, mb):
                assert state[unit] == "open" and (unit, mb) in done
                state[unit] = "reducing"
                reduced[unit, mb] += 1
            case Finish(unit, _):
                assert state.pop(unit) == "reducing"
    assert not state
    assert reduced == dict.fromkeys(last, 1)
    if untied(chain):
        assert peak <= 1  # while backward runs: a bounded number of gradient buffers whatever the depth


@given(programs, st.randoms(use_true_random=False), st.booleans())
def test_slots_never_serve_two_at_a_time_and_are_large_enough(case, random, weights_last):
    chain, micro_batches, prefetch = case
    sizes = {stage.name.replace("s", "u"): random.randrange(0, 100) for stage in chain}
    by_name = {stage.name: stage for stage in chain}
    program = training_program(chain, micro_batches, prefetch, weights_last=weights_last)
    full, gradients = full_slots(program, sizes), gradient_slots(program, chain, sizes)
    in_full: dict[int, str] = {}
    in_gradients: dict[int, tuple[str, int]] = {}
    for index, instruction in enumerate(program):
        match instruction:
            case Gather(unit):
                slot = full.taken[index]
                assert slot not in in_full and full.sizes[slot] >= sizes[unit]
                in_full[slot] = unit
            case Free(unit):
                in_full = {slot: other for slot, other in in_full.items() if other != unit}
            case Backward(stage, mb) | Weights(stage, mb):
                for unit in by_name[stage].gradients:
                    slot = gradients.taken[unit, mb]
                    assert in_gradients.setdefault(slot, (unit, mb)) == (unit, mb) and gradients.sizes[slot] >= sizes[unit]
            case Finish(unit, mb):
                del in_gradients[gradients.taken[unit, mb]]
    assert not in_full and not in_gradients


# -- the real models --------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [False, True])
def test_real_models_are_such_chains(tied):
    for model in (gpt2(GPT2Config(vocab_size=11, max_seq_len=8, n_layers=2, d_model=8, n_heads=2, tie_embeddings=tied)),
                  llama(LlamaConfig(vocab_size=11, max_seq_len=8, n_layers=2, d_model=8, n_heads=2, tie_embeddings=tied))):
        renamed = [Stage(s.name.replace("layers.", "block"), *(tuple(u.replace("layers.", "block") for u in units)
                                                              for units in (s.reads, s.backward_reads, s.gradients)))
                   for s in stages_of(model, group(model))]
        assert renamed == stages(2, tied=tied)


def test_units_kept_in_a_group_are_gathered_there_again():
    """Between forward and backward of a micro-batch a unit stays among a few ranks; the next micro-batch asks all again."""
    program = training_program(stages(3, tied=True), micro_batches=2, prefetch=1, stay=Stay.GROUP)
    for unit in ("block0", "block1"):
        assert [i.kept if isinstance(i, Gather) else i.keep for i in program
                if isinstance(i, Gather | Free) and i.unit == unit] == [False, True, True, False] * 2
    kept: set[str] = set()
    for instruction in program:
        if isinstance(instruction, Free) and instruction.keep:
            kept.add(instruction.unit)
        elif isinstance(instruction, Gather) and instruction.kept:
            kept.remove(instruction.unit)
    assert not kept
    plain = training_program(stages(3, tied=True), micro_batches=2, prefetch=1)
    assert words(program) == words(plain) and plain != program  # otherwise the same


def test_nothing_runs_backward_before_the_first_stage_that_learns():
    frozen = [replace(stage, gradients=()) if number < 2 else stage for number, stage in enumerate(stages(3))]
    program = training_program(frozen, micro_batches=1, prefetch=1)
    assert [i.stage for i in program if isinstance(i, Backward)] == ["head", "block2", "block1"]
    assert count(program, Gather) == {"embed": 1, "block0": 1, "block1": 2, "block2": 2, "head": 1}
