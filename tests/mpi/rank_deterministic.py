"""With shard.deterministic the losses, norms and weights of 1, 2, 4 and 8 ranks have the same bits, whatever the options."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from mpi4py import MPI

from mpshard.checkpoint import State, content_of, load_training, open_on_all, write
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.optim import AdamW
from mpshard.shard import shard
from tests.models_small import deal, gappy_batch
from tests.where import STAND_IN, here

RANKS = (2, 4, 8)
ON_STAND_IN = (2,)
TIMEOUT = 300
STEPS, T, VOCAB = 3 if STAND_IN else 20, 11, 101
# One a micro-batch: 3 a rank at 8 ranks, or at 4, do not fill the tree, nor do all on one rank.
SEQUENCES, FEWER = (6, 6) if STAND_IN else (24, 12)
LAYERS = 1 if MPI.COMM_WORLD.size == 8 else 2  # the more ranks share a core, the slower
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=LAYERS, d_model=26, n_heads=2, dropout=0.1)),
    "llama": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=LAYERS, d_model=24, n_heads=4, n_kv_heads=2, d_ff=40)),
}
ALWAYS = [{}, {"transport": "mpi"}, {"strategy": "none"}, {"transport": "shm", "ranks_on_node": 2}]
ON_4_RANKS = [{"prefetch": 0}, {"prefetch": 3}, {"unit": 2}, {"unit": "20kB"}, {"recompute": "block"}, {"recompute": "none"},
              {"transport": "mpi", "progress": "thread", "prefetch": 2}, {"strategy": "grad_op"},
              {"strategy": "optim", "transport": "mpi"}, {"transport": "shm", "ranks_on_node": 1}]
if STAND_IN:
    ALWAYS = [{}, {"transport": "staged", "prefetch": 2}, {"strategy": "none"}, {"prefetch": 0, "unit": 2}, {"recompute": "block"},
              {"strategy": "grad_op"}, {"strategy": "optim"}]
    ON_4_RANKS = []


def batch(step, sequences):
    return gappy_batch(step, sequences, T, VOCAB)


class Run:
    """A model in training with dropout and clipping, one sequence a micro-batch."""

    def __init__(self, comm, name, **options):
        self.comm = comm
        self.sharded = shard(MODELS[name](), comm, seed=3, **here(), deterministic=True, **options)
        self.optim = AdamW(self.sharded, lr=1e-2, clip_grad_norm=1.0)

    def train(self, first, last, sequences=SEQUENCES):
        """(loss, norm) of steps [first, last)."""
        outputs = []
        for step in range(first, last):
            outputs.append(self.sharded.step(deal(*batch(step, sequences), 1, self.comm.rank, self.comm.size)))
            self.optim.step(outputs[-1])
        return [(output.loss, output.grad_norm) for output in outputs]

    def weights(self):
        return self.sharded.full_weights()


@pytest.fixture(scope="module")
def alone(comm):
    """What one rank by itself gets: name, sequences -> ([(loss, norm)], weights). Collective."""

    @functools.cache
    def train(name, sequences):
        if comm.rank:
            return comm.bcast(None)
        run = Run(MPI.COMM_SELF, name)
        return comm.bcast((run.train(0, STEPS, sequences), run.weights()))

    return train


def assert_equal(weights, expected):
    for key, value in expected.items():
        np.testing.assert_array_equal(weights[key], value, err_msg=key)


@pytest.mark.parametrize(("name", "options"), [*(("gpt2", options) for options in ALWAYS + ON_4_RANKS), ("llama", {}),
                                               ("llama", {"transport": "mpi"})], ids=str)
def test_the_bits_of_one_rank(comm, alone, name, options):
    if comm.size != 4 and options in ON_4_RANKS:
        pytest.skip("on 4 ranks")
    sequences = FEWER if options in ON_4_RANKS else SEQUENCES
    run = Run(comm, name, **options)
    found, (expected, weights) = run.train(0, STEPS, sequences), alone(name, sequences)
    run.sharded.close()
    assert found == expected
    assert_equal(run.weights(), weights)


@pytest.mark.parametrize("name", MODELS)
def test_resumed_on_half_or_twice_as_many_ranks(comm, alone, shared_tmp_path, name):
    """All ranks' checkpoint goes on on half of them, and that one's on all again, as if one rank had done everything."""
    if name != "gpt2" and comm.size != 4:
        pytest.skip("on 4 ranks")
    half = comm.Split(comm.rank % 2, comm.rank)  # both halves do the same
    run = Run(comm, name)
    found = run.train(0, STEPS // 3)
    for number, (on, last) in enumerate([(half, 2 * STEPS // 3), (comm, STEPS)]):
        writer = run.sharded.mesh.comm
        root = shared_tmp_path / (str(number) if writer.size == comm.size else f"{number}-{comm.rank % 2}")
        content = content_of(run.sharded, run.optim, State(step=len(found), position=len(found) * SEQUENCES))
        directory = write(writer, root, content, run.sharded.device)
        run.sharded.close()
        run = Run(on, name)
        opened = open_on_all(on, comm.bcast(directory) if on is comm else directory)
        assert load_training(run.sharded, run.optim, opened).world == writer.size
        found += run.train(len(found), last)
    expected, weights = alone(name, SEQUENCES)
    assert found == expected
    assert_equal(run.weights(), weights)
    run.sharded.close()
