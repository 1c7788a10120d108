"""Recovery with ranks: the guard's interventions, leaving and going on, flipped bits, ranks that differ from the start."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpshard import comm as communication
from mpshard.config import ConfigError, load, resolve
from mpshard.loop import Loop, run
from mpshard.models import GPT2Config, gpt2
from mpshard.optim import AdamW
from mpshard.recover import integrity
from mpshard.recover.alike import check_alike, check_folder, check_start
from mpshard.recover.status import Ended
from mpshard.shard import shard
from mpshard.shard.precision import Precision
from tests.where import STAND_IN, here

RANKS = (1, 4)
ON_STAND_IN = (2,)
SETTINGS = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.dropout=0.1", "data.seq_len=8", "train.global_batch_size=4",
            "train.micro_batch_size=1", "train.steps=12", "checkpoint.every=4"]
if STAND_IN:  # which takes its time
    SETTINGS += ["run.device=cupy", "run.cuda_aware=yes", "train.micro_batch_size=2", "train.eval_batches=2"]


@pytest.fixture
def config(comm, shared_tmp_path):
    """Makes a configuration of a tiny run in a folder that all ranks see."""
    if comm.rank == 0:
        (shared_tmp_path / "text").write_text("All happy families are alike. " * 40)
    comm.barrier()
    return lambda *more, name="run": resolve(load(None, [*SETTINGS, f"data.train={shared_tmp_path}/text",
                                                         f"run.dir={shared_tmp_path}/{name}", *more]))


def lines(config) -> list[dict]:
    """What metrics.jsonl says, once rank 0 has written it. Collective."""
    communication.world.barrier()
    return [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]


def losses(config) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(config) if "loss" in line}


def events(config) -> list[tuple[int, str]]:
    return [(line["step"], line["event"]) for line in lines(config) if "event" in line and line["event"] != "slow"]


@pytest.fixture
def poison(monkeypatch):
    """poison(positions): the steps that begin there have no finite loss, as with a bad batch. Returns all that were begun at."""

    def install(*positions: int) -> list[int]:
        from mpshard import loop

        seen: list[int] = []
        one_step = loop.Loop._one_step

        def step(self):
            seen.append(self.position)
            here, run_step = self.position in positions, self.sharded.step

            def spoiled(batch):
                output = run_step(batch)
                return replace(output, loss=math.nan, grad_norm=math.nan) if here else output

            self.sharded.step = spoiled
            try:
                return one_step(self)
            finally:
                del self.sharded.step

        monkeypatch.setattr(loop.Loop, "_one_step", step)
        return seen

    return install


# -- the guard -------------------------------------------------------------------------------
def test_stop_says_so_and_leaves_the_checkpoint(comm, config, poison):
    poison(4 * 6)
    c = config("guard.nan=stop")
    with pytest.raises(Ended, match="stopped before the update of step 7: the loss is nan") as ended:
        run(c, comm)
    assert ended.value.status == 1
    assert events(c) == [(7, "stop")] and max(losses(c)) == 6
    assert os.readlink(Path(c.run.dir) / "checkpoints" / "latest") == "step-00000004"
    assert not (Path(c.run.dir) / "done.json").exists()


def test_skip_passes_over_the_batch_and_nothing_else(comm, config, poison):
    seen = poison(4 * 6)
    c = config("guard.nan=skip")
    run(c, comm)
    assert seen == [4 * step for step in range(12)]
    assert events(c) == [(7, "skip")] and sorted(losses(c)) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert json.loads((Path(c.run.dir) / "done.json").read_text())["step"] == 12


def test_rollback_returns_to_the_checkpoint_and_passes_over_the_batches_since(comm, config, poison):
    seen = poison(4 * 6)
    c = config("guard.nan=rollback")
    run(c, comm)
    # Steps 5 and 6 were good, the batch of the seventh was not: from step 4 on with the eighth batch.
    assert seen == [*range(0, 28, 4), *range(28, 60, 4)]
    assert events(c) == [(4, "rollback")] and sorted(losses(c)) == list(range(1, 13))


def test_rollback_gives_up_after_its_tries(comm, config, poison):
    poison(*range(24, 1000, 4))
    with pytest.raises(Ended, match=r"2 interventions \(guard.tries\) have not helped"):
        run(config("guard.nan=rollback", "guard.tries=2"), comm)


def test_rollback_without_a_checkpoint_is_a_stop(comm, config, poison):
    poison(8)
    with pytest.raises(Ended, match="there is no checkpoint to go back to"):
        run(config("guard.nan=rollback"), comm)


# -- leaving ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("number", "at", "more"), [(signal.SIGUSR1, 6, []), (signal.SIGTERM, 8, ["train.eval_every=4"]),
                                                    (signal.SIGUSR1, 3, ["checkpoint.async=true"])])
def test_asked_to_leave_and_gone_on_is_as_if_nothing_had_been(comm, config, monkeypatch, number, at, more):
    more = [*more, f"data.eval={config().data.train}"]
    whole = config(*more, name="whole")
    run(whole, comm)
    update = Loop._update

    def interrupted(self, output):
        if self.step + 1 == at and comm.rank == comm.size - 1:  # one rank alone is told
            os.kill(os.getpid(), number)
        update(self, output)

    c = config(*more, name="left")
    with monkeypatch.context() as patch, pytest.raises(Ended, match=f"checkpoint written at step {at} of 12") as ended:
        patch.setattr(Loop, "_update", interrupted)
        run(c, comm)
    assert ended.value.status == 75 and max(losses(c)) == at
    run(replace(c, run=replace(c.run, resume="auto")), comm)
    assert losses(c) == losses(whole)

    def evaluations(of):
        return [(line["step"], line["eval_loss"]) for line in lines(of) if "eval_loss" in line]

    assert evaluations(c) == evaluations(whole)
    assert events(c) == [(at, "preempted")]


# -- integrity -------------------------------------------------------------------------------
def flip(sharded, array) -> None:
    """A bit of an array that is on the device."""
    host = np.array(sharded.device.to_host(array))
    host.view(np.uint8)[4] ^= 1 << 3
    array[...] = sharded.device.from_host(host)


def trained(comm, strategy="full", transport="mpi", **more):
    model = gpt2(GPT2Config(vocab_size=23, max_seq_len=8, n_layers=2, d_model=16, n_heads=2))
    sharded = shard(model, comm, strategy=strategy, transport=transport, seed=1, **here(), **more)
    return sharded, AdamW(sharded)


OPTIONS = [{}, {"transport": "auto"}, {"strategy": "none", "transport": "auto"}, {"precision": Precision("bf16")},
           {"strategy": "hybrid", "ranks_on_node": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_whole_compares_equal(comm, options):
    sharded, optim = trained(comm, **options)
    integrity.compare(sharded, optim, 0)
    checks = integrity.Checksums(sharded, optim)
    ids = np.arange(8).reshape(1, 1, 8)
    for _ in range(2):
        output = sharded.step((ids, ids))
        checks.verify()
        optim.step(output)
        checks.updated()
    integrity.compare(sharded, optim, 8)
    sharded.close()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bit_flipped_in_a_slice_is_found_before_the_next_update(comm, options):
    sharded, optim = trained(comm, **options)
    checks = integrity.Checksums(sharded, optim)
    unit = list(sharded.units.values())[1]
    for array, words in ((unit.shard, f"weights of {unit.name}"),
                         (optim.state_tensors(unit, unit.segments[0])["exp_avg"], f"exp_avg of {unit.segments[0].name}")):
        comm.barrier()
        if comm.rank == comm.size - 1:
            flip(sharded, array)
            with pytest.raises(integrity.Damaged, match=f"{words} on rank {comm.rank} "):
                checks.verify()
            flip(sharded, array)
        checks.verify()
    sharded.close()


@pytest.mark.parametrize("options", [{}, {"precision": Precision("bf16")}, {"strategy": "grad_op"}], ids=str)
def test_a_bit_flipped_in_a_gathered_unit_is_found_when_it_is_freed(comm, options):
    sharded, optim = trained(comm, **options)
    integrity.Checksums(sharded, optim)
    unit, problems = list(sharded.units.values())[1], []
    free = unit.free

    def flipped_while_in_use(*keep) -> None:
        if comm.rank == 0:
            part = unit.full[(comm.size - 1) * unit.layout.shard_size:]
            flip(sharded, part)
            with pytest.raises(integrity.Damaged, match=f"{unit.name} as rank 0 .* holds it gathered") as found:
                free(*keep)
            problems.append(str(found.value))
            flip(sharded, part)
        free(*keep)

    unit.free = flipped_while_in_use
    ids = np.arange(8).reshape(1, 1, 8)
    sharded.step((ids, ids))
    assert bool(problems) == (comm.rank == 0)
    assert all(f"slice {comm.size - 1} " in problem or comm.size == 1 for problem in problems)
    sharded.close()


def test_a_replica_that_differs_is_named_on_every_rank(comm):
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    sharded, optim = trained(comm, strategy="none", transport="auto")
    if comm.rank == comm.size - 1:
        flip(sharded, list(sharded.units.values())[0].shard)
    with pytest.raises(Ended) as ended:
        integrity.compare(sharded, optim, 0)
    rank = comm.size - 1 if comm.size > 2 else 1
    assert f"on rank {rank} (" in str(ended.value) and list(sharded.units)[0] in str(ended.value)
    assert ("no majority" in str(ended.value)) == (comm.size == 2)
    sharded.close()


# -- the start -------------------------------------------------------------------------------
def test_ranks_that_differ_are_refused(comm, config):
    check_start(comm, config())
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    odd = comm.rank == comm.size - 1
    with pytest.raises(ConfigError, match=rf"optim.lr is .* rank {'1' if comm.size == 2 else comm.size - 1}"):
        check_start(comm, config(*(["optim.lr=0.5"] if odd else [])))
    with pytest.raises(ConfigError, match="version is"):
        check_alike(comm, {"version": comm.rank})


def test_a_run_directory_that_is_not_shared_is_refused(comm, shared_tmp_path, monkeypatch):
    check_folder(comm, shared_tmp_path)
    assert not list(shared_tmp_path.glob(".seen*"))
    if comm.size == 1:
        pytest.skip("one rank sees what it sees")
    monkeypatch.setattr("mpshard.recover.alike.PATIENCE", 0.1)
    mine = shared_tmp_path / ("here" if comm.rank == 0 else "there")
    with pytest.raises(ConfigError, match="is not the directory that rank 0 sees"):
        check_folder(comm, mine)
