"""Strategies that put ranks into groups, and weights of 8 bits on their way, on the stand-in for CuPy: the losses of NumPy, bytes and
memory as planned."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mpshard.device import open_device
from mpshard.models import LlamaConfig, llama
from mpshard.optim import AdamW
from mpshard.plan import plan
from mpshard.recover.integrity import Checksums
from mpshard.shard import shard
from mpshard.shard.precision import Precision
from tests.device import cuda_on_cpu, lazy_cupy
from tests.models_small import deal

RANKS = (2, 4)
TIMEOUT = 300
pytestmark = [pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
              pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))]
T, VOCAB, MICRO, STEPS = 7, 61, 2, 2
SHORT, EIGHT = Precision("bf16", reduce="bf16"), Precision("bf16", "fp8_e4m3", "bf16")
ON_2 = [{"strategy": "none"}, {"strategy": "none", "deterministic": True}, {"strategy": "none", "precision": SHORT},
        {"strategy": "hybrid", "dp_replicate": 2}, {"strategy": "hybrid", "dp_replicate": 2, "precision": SHORT}, {"precision": EIGHT}]
ON_4 = [{"strategy": "none"}, {"strategy": "hybrid", "dp_replicate": 2}, {"strategy": "hybrid", "dp_replicate": 2, "precision": SHORT},
        {"reshard_after_forward": 2}, {"reshard_after_forward": 2, "precision": SHORT, "prefetch": 2},
        {"strategy": "hybrid", "dp_replicate": 2, "precision": EIGHT}]


def train(comm, device, **options):
    """Losses and norms, and the Sharded."""
    model = llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24))
    sharded = shard(model, comm, device=device, seed=1, **options)
    optim = AdamW(sharded, lr=1e-2, clip_grad_norm=1.0)
    found = []
    for step in range(STEPS):
        batch = np.random.default_rng(step).integers(VOCAB, size=(2, MICRO * comm.size, T))
        output = sharded.step(deal(*batch, 1, comm.rank, comm.size))
        optim.step(output)
        found.append((output.loss, output.grad_norm))
    return found, sharded


@pytest.fixture(scope="module")
def on_numpy(comm):
    @functools.cache
    def losses(precision):
        return train(comm, open_device("numpy"), precision=precision)[0]

    return losses


@pytest.mark.parametrize("transport", ["mpi", "staged"])
@pytest.mark.parametrize("number", range(6))
def test_equal_to_numpy(comm, on_numpy, transport, number):
    if comm.size == 4 and (transport == "mpi") != (number % 2 == 0):
        pytest.skip("on 4 ranks each case one way: it takes a while")
    options = (ON_2 if comm.size == 2 else ON_4)[number]
    with lazy_cupy.installed():
        device = open_device("cupy", poison=True)
        device.memory.reset_peak()
        found, sharded = train(comm, device, transport=transport, cuda_aware="yes", **options)
        np.testing.assert_allclose(found, on_numpy(options.get("precision", Precision())), rtol=3e-2 if "precision" in options else 2e-5)
        planned = plan(sharded.model, sharded.options, comm.size, MICRO, rank=comm.rank, on_host=False)
        assert planned.program == sharded.program(MICRO)
        assert {kind: device.memory.peak(kind) for kind in planned.bytes} == dict(planned.bytes)
        counters = sharded.last.counters
        assert (counters.bytes_gathered, counters.bytes_reduced) == (planned.bytes_gathered, planned.bytes_reduced)
        weights = sharded.full_weights()
        same = comm.bcast(weights)
        for name, value in weights.items():
            np.testing.assert_array_equal(value, same[name])


@pytest.mark.parametrize("precision", [SHORT, EIGHT], ids=str)
def test_gathered_units_are_what_their_owners_wrote(comm, precision):
    """`guard.checksums`: in the type that a GPU computes in, not the masters'."""
    with lazy_cupy.installed():
        model = llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=1, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24))
        sharded = shard(model, comm, device=open_device("cupy", poison=True), cuda_aware="yes", transport="mpi", precision=precision)
        checksums = Checksums(sharded, optim := AdamW(sharded, lr=1e-2))
        for step in range(2):
            batch = np.random.default_rng(step).integers(VOCAB, size=(2, comm.size, T))
            output = sharded.step(deal(*batch, 1, comm.rank, comm.size))
            checksums.verify()
            optim.step(output)
            checksums.updated()
