"""A save that not every rank calls is an error that names the ranks, within seconds, and nobody hangs."""

from __future__ import annotations

import pytest

from mpshard.checkpoint import Saver
from mpshard.comm import roll_call as module
from mpshard.comm.roll_call import roll_call
from mpshard.models import GPT2Config, gpt2
from mpshard.optim import AdamW
from mpshard.shard import shard

RANKS = (4,)


def test_everybody_here(comm):
    own = comm.Dup()
    for _ in range(20):
        roll_call(own, "f", patience=60)


def test_a_save_called_on_one_rank_alone(comm, shared_tmp_path, monkeypatch):
    sharded = shard(gpt2(GPT2Config(vocab_size=11, max_seq_len=4, n_layers=1, d_model=8, n_heads=2)), comm)
    saver = Saver(shared_tmp_path / "run", sharded, AdamW(sharded))
    if comm.size == 1:
        saver.save(1, 1)
        return
    alone = comm.size - 1
    monkeypatch.setattr(module, "PATIENCE", 1.0)
    if comm.rank == alone:
        absent = "ranks " + ", ".join(map(str, range(alone))) if alone > 1 else "rank 0"
        with pytest.raises(RuntimeError, match=f"Saver.save was called on rank {alone} only; {absent} did not call it within 1 s"):
            saver.save(1, 1)
    comm.barrier()
    if comm.rank != alone:
        roll_call(saver.comm, "Saver.save")  # complete what is pending, so that MPI can be left


def test_all_but_one_learn_of_each_other(comm):
    own = comm.Dup()
    if comm.size < 3:
        return
    if comm.rank != 0:
        with pytest.raises(RuntimeError, match=f"f was called on ranks {', '.join(map(str, range(1, comm.size)))} only; rank 0"):
            roll_call(own, "f", patience=1.0)
    comm.barrier()
    if comm.rank == 0:
        roll_call(own, "f")


def test_one_who_comes_while_the_others_ask_is_welcome(comm):
    own, own2 = comm.Dup(), comm.Dup()
    if comm.rank == 0 and comm.size > 1:
        own2.recv(source=comm.size - 1)  # until the last has lost its patience
    if comm.rank == comm.size - 1 and comm.size > 1:
        original = module._within

        def within(seconds, request, meanwhile=None):
            if meanwhile is not None:
                own2.send(None, 0)
                seconds = 60
            return original(seconds, request, meanwhile)

        module._within = within
        try:
            roll_call(own, "f", patience=0.2)
        finally:
            module._within = original
    else:
        roll_call(own, "f", patience=60)
    comm.barrier()
