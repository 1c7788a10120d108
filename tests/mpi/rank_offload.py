"""What a GPU leaves in the host's memory, on the stand-in for CuPy: not a bit of a run changes, and the memory is free."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpshard.checkpoint.manifest import State
from mpshard.checkpoint.save import content_of, snapshot
from mpshard.device import Kind, open_device
from mpshard.models import LlamaConfig, llama
from mpshard.optim import SGD, AdamW, Muon
from mpshard.plan import plan
from mpshard.shard import away, shard
from mpshard.shard.precision import Precision
from mpshard.shard.schedule import Offload
from tests.device import cuda_on_cpu, lazy_cupy
from tests.models_small import deal

RANKS = (1, 2)
TIMEOUT = 300
pytestmark = pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))
SEQUENCES, T, VOCAB, LAYERS = 4, 5, 61, 3
BF16 = Precision("bf16", reduce="bf16")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(away, "SMALLEST", 1)
    with lazy_cupy.installed():
        yield open_device("cupy", poison=True)


def run(comm, device, optimizer, micro=1, steps=2, layers=LAYERS, **options):
    """Some steps; losses, weights and moments."""
    model = llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=layers, d_model=32, n_heads=2, n_kv_heads=1, d_ff=48, arch="qwen3"))
    sharded = shard(model, comm, device=device, seed=1, cuda_aware="yes", **options)
    optim, losses = optimizer(sharded), []
    for step in range(steps):
        batch = np.random.default_rng(step).integers(VOCAB, size=(2, SEQUENCES, T))
        losses.append(sharded.step(deal(*batch, micro, comm.rank, comm.size)))
        optim.step(losses[-1])
    kept = {f"{kind} {s.name}": device.to_host(array).copy() for unit in sharded.units.values() for s in unit.segments
            for kind, array in {**optim.state_tensors(unit, s), "master": unit.shard[s.slice]}.items()}
    if optim.average is not None:
        with optim.average.in_place():
            kept["averages"] = np.concatenate([v.ravel() for v in sharded.full_weights().values()])
    return sharded, optim, [output.loss for output in losses], kept


def equal(a, b):
    assert a[2] == b[2]
    assert a[3].keys() == b[3].keys()
    for name, values in a[3].items():
        np.testing.assert_array_equal(values, b[3][name], err_msg=name)


@pytest.mark.parametrize(("optimizer", "precision"), [
    (lambda s: AdamW(s, lr=1e-2), BF16), (lambda s: AdamW(s, lr=1e-2), Precision()),
    (lambda s: AdamW(s, lr=1e-2, moments="bf16", ema=0.5), BF16), (lambda s: Muon(s, lr=1e-2), BF16),
    (lambda s: SGD(s, lr=0.1, momentum=0), BF16)], ids=["bf16", "fp32", "bf16 moments, average", "muon", "sgd"])
def test_the_optimizer_in_the_hosts_memory(comm, device, optimizer, precision):
    here = run(comm, device, optimizer, precision=precision)
    there = run(comm, device, optimizer, precision=precision, offload="optimizer")
    equal(here, there)
    sharded, optim = there[:2]
    unit = sharded.units["layers.0"]
    assert unit.master.away == (precision is BF16)  # in fp32 gathers send the masters themselves
    assert isinstance(unit.shard, np.ndarray) == unit.master.away
    assert all(lasting.away or not lasting.array.size for lasting in optim.moments["layers.0"].lasting.values())


@pytest.mark.parametrize("options", [
    {}, {"recompute": "none"}, {"recompute": "block"}, {"recompute": 2, "micro": 2}, {"strategy": "grad_op", "micro": 2},
    {"precision": BF16, "offload": "all"}], ids=str)
def test_activations_in_the_hosts_memory(comm, device, options):
    options = {"offload": "activations"} | options
    here = run(comm, device, AdamW, **{**options, "offload": "none"})
    there = run(comm, device, AdamW, **options)
    equal(here, there)
    program = there[0].program(options.get("micro", 1))
    moved = [i.stage for i in program if isinstance(i, Offload)]
    assert moved == [f"layers.{i}" if i >= 0 else "embed" for i in range(-1, LAYERS - 1)] * options.get("micro", 1)
    assert there[0].engine.away.bytes_moved > 0


@pytest.mark.parametrize("recompute", ["pointwise", "block"])
def test_memory_is_free_meanwhile(comm, device, recompute):
    peaks = {}
    for offload in ("none", "activations"):
        device.memory.reset_peak()
        sharded, *_ = run(comm, device, AdamW, steps=1, layers=10, recompute=recompute, offload=offload)
        peaks[offload] = device.memory.peak(Kind.ACTIVATION)
    assert peaks["activations"] < 0.8 * peaks["none"]


@pytest.mark.parametrize("precision", [BF16, Precision()], ids=["bf16", "fp32"])
def test_the_plan_knows_it(comm, device, precision):
    device.memory.reset_peak()
    sharded, *_ = run(comm, device, lambda s: AdamW(s, ema=0.9), offload="all", precision=precision)
    planned = plan(sharded.model, sharded.options, comm.size, 1, rank=comm.rank, on_host=False, average=True)
    assert planned.program == sharded.program(1)
    for kind, nbytes in planned.bytes.items():
        assert device.memory.peak(kind) == nbytes, kind


def test_a_snapshot_is_a_copy(comm, device):
    sharded, optim, *_ = run(comm, device, AdamW, offload="optimizer", precision=BF16)
    unit = sharded.units["head"]
    assert unit.shard.dtype == np.float32 and unit.store.local.dtype == ml_dtypes.bfloat16
    copied = snapshot(content_of(sharded, optim, State()), device)
    before = {piece.name: np.array(piece.array) for of_file in copied.pieces.values() for piece in of_file}
    batch = np.random.default_rng(7).integers(VOCAB, size=(2, SEQUENCES, T))
    optim.step(sharded.step(deal(*batch, 1, comm.rank, comm.size)))
    assert not np.array_equal(unit.shard, before.get("master.lm_head.weight", before["lm_head.weight"]))
    for of_file in copied.pieces.values():
        for piece in of_file:
            np.testing.assert_array_equal(piece.array, before[piece.name])
