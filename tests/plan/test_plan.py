"""Plans against the ZeRO paper's figures, in what they refuse, and against what the command's own run measures."""

from __future__ import annotations

import json

import pytest

from mpshard.config import ConfigError, load, validate
from mpshard.device.base import Kind
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.plan import fewest_ranks, plan, plan_of, plans
from mpshard.plan.costs import largest_slots, partial_sums, topology
from mpshard.plan.zero import state_bytes
from mpshard.shard.options import Options
from mpshard.shard.precision import Precision
from mpshard.shard.schedule import Finish, Reduce
from tests.launch import launch

TINY = ["model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.vocab_size=300", "data.seq_len=16",
        "train.micro_batch_size=2", "train.global_batch_size=8"]


@pytest.mark.parametrize(("strategy", "volume"), [("none", 2), ("optim", 2), ("grad_op", 2), ("full", 3)])
def test_volumes_are_those_of_the_zero_paper(strategy, volume):
    # Rajbhandari et al. 2019, section 7: a rank moves 2 psi elements a step, 3 psi in stage 3; (N - 1) / N of that, and at
    # full sharding less the units that stay full between forward and backward, here one of many.
    model = llama(LlamaConfig(n_layers=64, d_model=64, n_heads=4, vocab_size=64))
    made = plan(model, Options(strategy=strategy, prefetch=0, transport="auto" if strategy == "none" else "mpi"), 64)
    moved = (made.bytes_gathered + made.bytes_reduced) / 4 / model.size / (63 / 64)
    assert moved == pytest.approx(volume, rel=0.04)


@pytest.mark.parametrize(("strategy", "gigabytes"), [("none", 120), ("optim", 31.4), ("grad_op", 16.6), ("full", 1.9)])
def test_states_are_those_of_the_zero_papers_first_figure(strategy, gigabytes):
    # Rajbhandari et al. 2019 (arXiv:1910.02054), figure 1: 7.5 billion parameters on 64 ranks.
    assert state_bytes(7.5e9, 64, strategy) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_states_fall_as_one_over_the_ranks():
    model = llama(LlamaConfig(n_layers=8, d_model=256, n_heads=4, vocab_size=1000))
    for ranks in (1, 4, 16):
        made = plan(model, Options(transport="mpi"), ranks)
        for kind, copies in ((Kind.PARAMETER, 1), (Kind.GRADIENT, 1), (Kind.MOMENT, 2)):
            assert made.bytes[kind] == pytest.approx(4 * copies * model.size / ranks, rel=0.01)
        assert made.gathers == 2 * 10 - 2 and made.reduces == 10  # the last unit stays full, the first is not read by backward


def test_buffers_of_several_programs():
    assert largest_slots([[5, 9], [7]]) == [9, 5]
    assert largest_slots([[1, 2], [3, 1, 1]]) == [3, 1, 1]


def test_partial_sums_of_a_binary_counter():
    program = [step(unit, mb) for mb in range(4) for unit in ("a", "b") for step in (Reduce, Finish)]
    # Before the last micro-batch a unit holds sums of 2 and 1, and the new one: 3; the other one 2 or nothing.
    assert partial_sums(program, {"a": 10, "b": 10}) == 30 + 20


def test_groups():
    assert topology(Options(strategy="hybrid"), 8, ranks_on_node=4).group == 4
    assert topology(Options(strategy="hybrid", dp_replicate=4), 8).group == 2
    assert not topology(Options(), 4, ranks_on_node=1).shares_memory and topology(Options(), 4).in_place
    with pytest.raises(ConfigError, match="does not multiply out"):
        topology(Options(strategy="hybrid", dp_shard=3), 8)


@pytest.mark.parametrize(("options", "on_host", "message"), [
    ({"embedding": "rows"}, True, "the head reads the table"), ({"transport": "staged"}, True, "use auto, mpi or shm"),
    ({"transport": "shm"}, False, "use mpi or staged"), ({"progress": "thread"}, False, "use poll"),
    ({"precision": Precision("bf16", reduce="fp16")}, False, "use fp32 or the same")])
def test_what_a_run_would_refuse_is_not_planned(options, on_host, message):
    with pytest.raises(ConfigError, match=message):
        plan(gpt2(GPT2Config(n_layers=1, d_model=8, n_heads=1)), Options(**options), 2, on_host=on_host)


def test_what_fits():
    config = load(None, [*TINY, "shard.transport=mpi"])
    need = [row["total_bytes"] + row["activation_bytes_estimated"] for row in plans(config, [1, 2, 4])["plans"]]
    assert need[0] > need[1] > need[2]
    found = plans(config, [1, 2, 4], device_bytes=need[1])
    assert [row["fits"] for row in found["plans"]] == [False, True, True]
    assert fewest_ranks(config, 1000) is None


def test_what_is_offloaded_needs_no_memory_of_the_gpu():
    words = [*TINY, "model.n_layers=12", "run.device=cupy", "precision.param=bf16", "precision.reduce=bf16"]
    (here,), (there,) = (plans(load(None, [*words, f"shard.offload={offload}"]), [2])["plans"] for offload in ("none", "all"))
    assert here["bytes"]["moment"] == 2 * here["bytes"]["gradient"] > 0 == there["bytes"]["moment"]
    assert here["bytes"]["parameter"] == 3 * there["bytes"]["parameter"]  # masters of 4 bytes, and what gathers send, of 2
    assert there["activation_bytes_estimated"] < here["activation_bytes_estimated"]
    with pytest.raises(ConfigError, match='shard.offload="all" has no effect'):
        validate(load(None, [*TINY, "run.device=numpy", "shard.offload=all"]), 2)


def test_a_number_of_ranks_that_cannot_be():
    (row,) = plans(load(None, TINY), [3])["plans"]
    assert "not a multiple" in row["problem"]


@pytest.mark.mpi
@pytest.mark.parametrize("settings", [[], ["shard.strategy=grad_op", "shard.transport=mpi"], ["precision.param=bf16", "optim.moments=bf16"],
                                      ["shard.unit=2", "shard.prefetch=2", "optim.name=sgd"]])
def test_the_command_agrees_with_a_run(tmp_path, settings):
    (tmp_path / "tiny.toml").touch()
    words = [str(tmp_path / "tiny.toml"), *TINY, *settings]
    planned = launch(1, ["-m", "mpshard", "plan", *words, "--ranks", "2", "--json"])
    assert planned.returncode == 0, planned.report()
    (row,) = json.loads(planned.stdout)["plans"]
    ran = launch(2, ["-m", "mpshard", "bench", "step", *words, "--steps", "1", "--warmup", "1", "--no-gemm", "--json"])
    assert ran.returncode == 0, ran.report()
    measured = json.loads(ran.stdout)
    assert (measured["bytes_gathered"], measured["bytes_reduced"]) == (row["bytes_gathered"], row["bytes_reduced"])
    evaluates = plan_of(load(None, [*TINY, *settings]), 2)  # a bench has no evaluation, whose buffers may be larger
    for kind in ("parameter", "gradient", "moment", "full_gradient"):
        assert measured["peak_bytes_by_kind"][kind] == row["bytes"][kind] == evaluates.bytes[Kind(kind)]
    assert measured["peak_bytes_by_kind"]["gathered"] <= row["bytes"]["gathered"]


@pytest.mark.mpi
def test_the_table(tmp_path):
    (tmp_path / "tiny.toml").touch()
    done = launch(1, ["-m", "mpshard", "plan", str(tmp_path / "tiny.toml"), *TINY, "--ranks", "1,3,4", "--device-bytes", "1e6"])
    assert done.returncode == 0 and "4 ranks" in done.stdout and "3 ranks: train.global_batch_size=8" in done.stdout, done.report()
