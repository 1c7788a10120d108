"""What was planned is what is held and moved: byte for byte, on every rank, by every strategy."""

from __future__ import annotations

import numpy as np
import pytest

from mpshard.device import Kind
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.optim import SGD, AdamW, Muon
from mpshard.plan import activation_bytes, plan
from mpshard.shard import shard
from mpshard.shard.options import Options
from mpshard.shard.precision import Precision
from tests.where import STAND_IN, here

RANKS = (1, 4)
ON_STAND_IN = (2,)
TIMEOUT = 180
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(n_layers=2, d_model=26, n_heads=2, vocab_size=101, max_seq_len=12)),
    "llama": lambda: llama(LlamaConfig(n_layers=3, d_model=24, n_heads=4, n_kv_heads=2, d_ff=40, vocab_size=101)),
}


def run(comm, model, micro, optimizer=AdamW, **options):
    """Two steps; what this rank held at most, and the last step's counters."""
    sharded = shard(model, comm, **here(), **options)
    optim = optimizer(sharded)
    ids = np.random.default_rng(comm.rank).integers(101, size=(micro, 2, 13))
    for _ in range(2):
        output = sharded.step((ids[..., :-1], ids[..., 1:]))
        optim.step(output)
    sharded.close()
    return {kind: sharded.device.memory.peak(kind) for kind in Kind}, output.counters


@pytest.mark.parametrize("name", ["llama"] if STAND_IN else MODELS)
@pytest.mark.parametrize(("micro", "options"), [
    (1, {}),
    (1, {"prefetch": 0}),
    (3, {"prefetch": 2}),
    (2, {"reduce": "alltoall"}),
    (2, {"reshard_after_forward": False}),
    (2, {"unit": 2}),
    (1, {"unit": "20kB"}),
    (2, {"strategy": "grad_op"}),
    (2, {"strategy": "optim"}),
    (2, {"strategy": "none"}),
    (1, {"precision": Precision(param="bf16", reduce="bf16")}),
    (2, {"precision": Precision(param="bf16", gather="fp8_e4m3")}),
    (1, {"recompute": "block"}),
    (1, {"transport": "shm"}),
    (2, {"transport": "shm", "precision": Precision(param="bf16")}),
    (1, {"transport": "shm", "ranks_on_node": 1}),
    (2, {"transport": "shm", "ranks_on_node": 2}),
    (1, {"strategy": "hybrid", "dp_replicate": 2, "transport": "mpi"}),
    (2, {"strategy": "hybrid", "dp_shard": 1, "transport": "mpi"}),
    (5, {"deterministic": True}),
    (2, {"reshard_after_forward": 2}),
    (1, {"reshard_after_forward": 2, "precision": Precision(param="bf16"), "prefetch": 2}),
])
def test_bytes(comm, name, micro, options):
    if STAND_IN and options.get("transport") == "shm":
        pytest.skip("a GPU shares no memory; refused: see rank_device")
    if comm.size % max(options.get("ranks_on_node", 1), options.get("dp_replicate", 1)):
        pytest.skip("does not divide the ranks")
    if options.get("deterministic") and comm.size & (comm.size - 1):
        pytest.skip("no power of two ranks")
    if options.get("reshard_after_forward") == 2 and comm.size != 4:
        pytest.skip("needs a divisor that is not all")
    model = MODELS[name]()
    options = {"transport": "auto" if options.get("strategy") == "none" else "mpi", "progress": "poll", **options}
    planned = plan(model, Options(**{k: v for k, v in options.items() if k != "ranks_on_node"}), comm.size, micro, rank=comm.rank,
                   ranks_on_node=options.get("ranks_on_node", 0), on_host=not STAND_IN)
    held, counters = run(comm, model, micro, **options)
    assert {kind: held[kind] for kind in planned.bytes} == dict(planned.bytes)
    assert (counters.bytes_gathered, counters.bytes_reduced) == (planned.bytes_gathered, planned.bytes_reduced)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_parameters_cost_neither_gradient_nor_moments(comm, name):
    model = MODELS[name]()
    for parameter in model.parameters:
        parameter.trainable = ".1." in parameter.name
    planned = plan(model, Options(transport="mpi"), comm.size, rank=comm.rank, on_host=not STAND_IN)
    held, counters = run(comm, model, 1, transport="mpi", progress="poll")
    assert {kind: held[kind] for kind in planned.bytes} == dict(planned.bytes)
    assert counters.bytes_reduced == planned.bytes_reduced
    assert held[Kind.GRADIENT] < held[Kind.PARAMETER] / 2


@pytest.mark.parametrize(("optimizer", "planned"), [
    (lambda s: SGD(s), {"moments": 1}), (lambda s: SGD(s, momentum=0), {"moments": 0}),
    (lambda s: AdamW(s, moments="bf16", ema=0.9), {"moment_dtype": "uint16", "average": True}),
    (lambda s: Muon(s), {"single": "matrices"})])
def test_moments(comm, optimizer, planned):
    model = MODELS["llama"]()
    planned = planned | ({"single": model.matrices} if "single" in planned else {})
    expected = plan(model, Options(transport="mpi"), comm.size, rank=comm.rank, on_host=not STAND_IN, **planned).bytes[Kind.MOMENT]
    held, _ = run(comm, model, 1, optimizer, transport="mpi", progress="poll")
    assert held[Kind.MOMENT] == expected


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("recompute", "products"), [("none", ""), ("pointwise", ""), ("block", ""), ("pointwise", "fp8")])
def test_the_estimate_of_activations(comm, name, recompute, products):
    b, t = (2, 32) if STAND_IN else (8, 256)
    model = (gpt2(GPT2Config(n_layers=6, d_model=64, n_heads=4, vocab_size=101, max_seq_len=t)) if name == "gpt2" else
             llama(LlamaConfig(n_layers=6, d_model=64, n_heads=4, vocab_size=101)))
    precision = Precision(products=products)
    sharded = shard(model, comm, **here(), recompute=recompute, transport="mpi", progress="poll", precision=precision)
    ids = np.random.default_rng(comm.rank).integers(101, size=(1, b, t + 1))
    sharded.step((ids[..., :-1], ids[..., 1:]))
    sharded.close()
    estimated = activation_bytes(model, Options(recompute=recompute, precision=precision), b * t)
    assert estimated == pytest.approx(sharded.device.memory.peak(Kind.ACTIVATION), rel=0.2)
