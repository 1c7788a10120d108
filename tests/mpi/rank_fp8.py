"""Training with products of 8 bits: learns as without, the same on one rank and on two, on the CPU and on the stand-in for CuPy."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpshard.config import LoraConfig
from mpshard.device import open_device
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import add_adapters
from mpshard.optim import AdamW
from mpshard.plan import plan
from mpshard.shard import shard
from mpshard.shard.options import Options
from mpshard.shard.precision import Precision
from tests.device import cuda_on_cpu, lazy_cupy, lazy_nvidia
from tests.models_small import deal

RANKS = (2,)
TIMEOUT = 200
SEQUENCES, T, VOCAB = 8, 16, 40
FP8 = Precision(products="fp8")
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=32, n_heads=2)),
    "llama": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=32, n_heads=2, n_kv_heads=1, d_ff=48)),
}
on_stand_in = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))


def train(comm, name, steps, micro=2, change=None, **options):
    """Losses and last weights. Every second token repeats the one before: something to learn."""
    model = MODELS[name]()
    if change is not None:
        change(model)
    sharded = shard(model, comm, seed=1, **{"device": open_device("numpy", poison=True), **options})
    optim, losses = AdamW(sharded, lr=1e-2), []
    for step in range(steps):
        tokens = np.random.default_rng(step).integers(VOCAB, size=(SEQUENCES, T + 1))
        tokens[:, 1::2] = tokens[:, :-1:2]
        output = sharded.step(deal(tokens[:, :-1], tokens[:, 1:], micro, comm.rank, comm.size))
        optim.step(output)
        losses.append(output.loss)
    weights, about = sharded.full_weights(), sharded.device.about
    sharded.close()
    return np.array(losses), weights, about


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_as_without(comm, name):
    steps, window = 60, 10
    exact, short = (train(comm, name, steps, precision=precision)[0] for precision in (Precision(), FP8))
    assert exact[-window:].mean() < 0.75 * exact[0]
    curves = [losses.reshape(-1, window).mean(axis=1) for losses in (exact, short)]
    apart = np.abs(curves[1] / curves[0] - 1)
    assert 1e-5 < apart.max() < 0.03, apart


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_and_two(comm, name):
    """The same but for the order of sums, which where it tips a number to the other neighbour of 8 bits shows a little more."""
    alone, together = (train(where, name, 10, precision=FP8)[0] for where in (MPI.COMM_SELF, comm))
    np.testing.assert_allclose(together, alone, rtol=1e-3)


@pytest.mark.parametrize("kernels", ["numpy", "auto"])
def test_deterministic_is_the_same_to_the_bit(comm, kernels):
    """A scale depends on the micro-batch and the whole weight alone, whoever computes with them."""
    options = {"device": "numpy", "kernels": kernels, "deterministic": True, "precision": FP8, "steps": 4}
    (alone, weights, _), (together, others, about) = (train(where, "llama", **options) for where in (MPI.COMM_SELF, comm))
    assert alone.tolist() == together.tolist()
    for key, value in weights.items():
        np.testing.assert_array_equal(value, others[key], err_msg=key)
    assert about.endswith(", fp8 products by rounding alone")


def test_adapters_learn_beside_it(comm):
    def adapters(model):
        add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "down_proj")))

    alone, together = (train(where, "llama", 8, change=adapters, precision=FP8)[0] for where in (MPI.COMM_SELF, comm))
    np.testing.assert_allclose(together, alone, rtol=1e-3)
    assert together[-1] < together[0]


@on_stand_in
@pytest.mark.parametrize(("name", "param", "libraries"), [("llama", "fp32", False), ("llama", "bf16", True), ("gpt2", "bf16", True)])
def test_equal_on_the_stand_in(comm, name, param, libraries):
    precision = Precision(param, reduce=param, products="fp8")
    expected = train(comm, name, 4, precision=precision)[0]
    options = {"device": "cupy", "cuda_aware": "yes", "precision": precision, "kernels": "auto" if libraries else "cuda"}
    with lazy_cupy.installed(), lazy_nvidia.installed():
        found, _, about = train(comm, name, 4, **options)
        asked = [call for call in lazy_nvidia.calls if "8 bits" in call]
    np.testing.assert_allclose(found, expected, rtol=5e-3 if param == "bf16" else 1e-3)  # as one rank and two: sums in another order
    assert ("fp8 products by cuBLASLt 0" in about) == libraries != ("fp8 products by rounding alone" in about)
    # Two blocks of four layers, three products each, 4 steps of 2 micro-batches; and two to try them.
    assert len(asked) == (2 * 4 * 3 * 4 * 2 + 2 if libraries else 0)


def test_the_plan_is_the_same(comm):
    """What is rounded lives for a product: nothing that is gathered, sent or kept differs."""
    model, options = MODELS["llama"](), {"strategy": "full", "transport": "mpi"}
    with_it, without = (plan(model, Options(precision=precision, **options), 2, 2) for precision in (FP8, Precision()))
    assert with_it == without
