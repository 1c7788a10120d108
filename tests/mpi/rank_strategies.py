"""Every strategy and format is another program or layout for the same engine: the same training."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from mpi4py import MPI

from mpshard.config import ConfigError
from mpshard.device import c_library, cpu_kernels, mkl
from mpshard.device.base import Kind
from mpshard.device.blas import set_blas_threads
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.optim import AdamW
from mpshard.shard import build, shard
from mpshard.shard.precision import Precision
from tests.cblas import cblas
from tests.models_small import deal, gappy_batch
from tests.where import STAND_IN, here, of_numpy, on_numpy

RANKS = (2, 4)
ON_STAND_IN = (2,)
TIMEOUT = 300
T, VOCAB, MICRO = 11, 101, 2
SEQUENCES, STEPS = (8, 2) if STAND_IN else (16, 4)  # the stand-in takes its time
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=3, d_model=26, n_heads=2, dropout=0.1)),
    "llama": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=3, d_model=24, n_heads=4, n_kv_heads=2, d_ff=40)),
}


def batch(step):
    return gappy_batch(step, SEQUENCES, T, VOCAB)


def train(comm, name="gpt2", steps=STEPS, micro=MICRO, lr=1e-2, **options):
    """Losses, norms, weights at the end, and the Sharded."""
    options = {**here(), **options}
    sharded = shard(MODELS[name](), comm, seed=3, **options)
    optim = AdamW(sharded, lr=lr)
    outputs = []
    for step in range(steps):
        outputs.append(sharded.step(deal(*batch(step), micro, comm.rank, comm.size)))
        optim.step(outputs[-1])
    sharded.close()
    return [o.loss for o in outputs], [o.grad_norm for o in outputs], sharded.full_weights(), sharded


@functools.cache
def alone(name="gpt2", **options):
    """What one rank by itself gets: losses, norms, weights."""
    return train(MPI.COMM_SELF, name, **on_numpy(), **options)[:3]


STRATEGIES = [
    {"strategy": "full"}, {"strategy": "full", "reshard_after_forward": False}, {"strategy": "full", "accumulate": "unsharded"},
    {"strategy": "grad_op"}, {"strategy": "grad_op", "transport": "mpi"},
    {"strategy": "optim"}, {"strategy": "optim", "transport": "mpi"},
    {"strategy": "none"}, {"strategy": "none", "reduce": "alltoall", "accumulate": "sharded"},
    {"strategy": "hybrid", "dp_replicate": 2}, {"strategy": "hybrid", "dp_shard": 1},
    {"strategy": "hybrid", "dp_replicate": 2, "transport": "mpi"},
    {"unit": 2}, {"unit": "20kB", "prefetch": 3}, {"unit": ["*.mlp.*", "*.ln_*"]},
    {"recompute": "block"}, {"recompute": 2, "strategy": "grad_op"},
]
if STAND_IN:  # where mpi is the default
    STRATEGIES = [options for options in STRATEGIES if "transport" not in options]


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()))
def test_every_strategy_trains_alike(comm, options):
    if comm.size % options.get("dp_replicate", 1):
        pytest.skip("the ranks cannot be cut so")
    losses, norms, weights, _ = train(comm, **options)
    expected_losses, expected_norms, expected = alone()
    # Dropout masks are a function of the global micro-batch, so one rank draws the same.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
    for key, value in expected.items():
        assert np.linalg.norm(weights[key] - value) <= 1e-3 * np.linalg.norm(value) + 1e-3, key


KEPT = [{}, {"prefetch": 0}, {"prefetch": 2, "progress": "thread"}, {"unit": 2}, {"precision": Precision(param="bf16")},
        {"precision": Precision(gather="fp8_e4m3")}, {"strategy": "hybrid", "dp_replicate": 1}, {"recompute": "block"}]


@pytest.mark.parametrize("options", KEPT, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_units_kept_among_neighbours_are_the_same_units(comm, name, options):
    if comm.size < 4:
        pytest.skip("fewer than all, more than one, and a divisor: 2 of 4")
    if name == "llama" and options:
        pytest.skip("once is enough")
    kept, whole = (train(comm, name, transport="mpi", reduce="alltoall", reshard_after_forward=choice, **options) for choice in (2, True))
    assert kept[:2] == whole[:2]
    for key, value in whole[2].items():
        np.testing.assert_array_equal(kept[2][key], value, err_msg=key)


def test_bytes_and_memory_of_units_kept_among_neighbours(comm):
    if comm.size < 4:
        pytest.skip("needs 4 ranks")

    def gathered(choice):
        sharded = shard(MODELS["llama"](), comm, **here(), transport="mpi", reshard_after_forward=choice)
        counters = sharded.step(deal(*batch(0), MICRO, comm.rank, comm.size)).counters
        return sharded, counters.bytes_gathered, sharded.device.memory.current(Kind.GATHERED)

    sharded, few, memory = gathered(2)
    _, all_, memory_of_all = gathered(True)
    again = sum(4 * unit.layout.padded_size for name, unit in sharded.units.items() if name not in ("embed", "head"))
    m = SEQUENCES // MICRO // comm.size
    assert all_ - few == m * (again * 3 // 4 - again // 2)  # before backward 1/2 of each comes from others, not 3/4
    assert memory - memory_of_all == again // 2


@pytest.mark.parametrize(("strategy", "gathers", "reduces"), [
    # units' sizes gathered and reduced a micro-batch or a step: ZeRO-3's 3 psi less the units that stay, 2 psi for the others
    ("full", lambda psi, m, once: m * (2 * psi - once), lambda psi, m: m * psi),
    ("grad_op", lambda psi, m, once: psi, lambda psi, m: m * psi),
    ("optim", lambda psi, m, once: psi, lambda psi, m: psi),
    ("none", lambda psi, m, once: 0, lambda psi, m: 2 * psi),
])
def test_bytes_moved(comm, strategy, gathers, reduces):
    sharded = shard(MODELS["llama"](), comm, **here(), strategy=strategy, transport="auto" if strategy == "none" else "mpi")
    output = sharded.step(deal(*batch(0), MICRO, comm.rank, comm.size))
    sizes = {name: unit.layout.shard_size * 4 * (1 if strategy == "none" else comm.size) for name, unit in sharded.units.items()}
    m, psi, once = SEQUENCES // MICRO // comm.size, sum(sizes.values()), sizes["embed"] + sizes["head"]
    share = (comm.size - 1) / comm.size
    assert output.counters.bytes_gathered == round(gathers(psi, m, once) * share)
    assert output.counters.bytes_reduced == pytest.approx(reduces(psi, m) * share, abs=8 * len(sizes))


@pytest.mark.parametrize("strategy", ["full", "grad_op", "optim", "none", "hybrid"])
def test_memory_of_each_strategy(comm, strategy):
    sharded = train(comm, "llama", steps=1, strategy=strategy, transport="auto" if strategy == "none" else "mpi",
                    dp_replicate=2 if strategy == "hybrid" and comm.size > 1 else 0)[-1]
    memory, psi = sharded.device.memory, 4 * sharded.model.size
    whole = 1 if strategy == "none" else comm.size
    slack = 1.02 * psi / whole + 64 * len(sharded.units)
    assert memory.current(Kind.MOMENT) <= 2 * slack
    assert memory.peak(Kind.GATHERED) <= (psi * 1.1 if strategy in ("grad_op", "optim") else psi * 0.8)
    if strategy in ("full", "grad_op", "optim", "none"):
        assert memory.current(Kind.PARAMETER) <= slack and memory.current(Kind.GRADIENT) <= slack


@pytest.mark.parametrize("transport", ["staged"] if STAND_IN else ["mpi", "shm"])
@pytest.mark.parametrize(("precision", "tolerance"), [
    (Precision(param="bf16"), 5e-3), (Precision(param="bf16", reduce="bf16"), 2e-2), (Precision(param="fp16"), 2e-3),
    (Precision(param="bf16", gather="fp8_e4m3"), 5e-2)],
    ids=lambda p: f"{p.param}-{p.gather}-{p.reduce}" if isinstance(p, Precision) else "")
def test_short_formats_train_nearly_alike(comm, precision, tolerance, transport):
    losses, _, _, sharded = train(comm, precision=precision, transport=transport, lr=1e-3)
    expected, _, _ = alone(lr=1e-3)
    assert losses != expected
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    assert all(unit.shard.dtype == np.float32 for unit in sharded.units.values())


@of_numpy("MKL's products")
@pytest.mark.parametrize("on_all", [True, False])
def test_bf16_products_are_everybodys_or_nobodys(comm, monkeypatch, on_all):
    calls = []

    def product(*args):
        calls.append(args)
        cblas(*args)

    monkeypatch.setattr(c_library, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(mkl, "find", lambda: product if on_all or comm.rank == 0 else "not here")
    losses, _, _, sharded = train(comm, precision=Precision(param="bf16"), lr=1e-3, device="numpy")
    assert bool(calls) == on_all == ("MKL" in sharded.device.about)
    np.testing.assert_allclose(losses, alone(lr=1e-3)[0], rtol=5e-3)


@of_numpy("compiled products")
@pytest.mark.skipif(not c_library.multiplies_bf16(), reason="this processor has no bfloat16 arithmetic, or there are no compiled kernels")
@pytest.mark.parametrize("on_all", [True, False])
def test_our_bf16_products_are_everybodys_or_nobodys(comm, monkeypatch, on_all):
    monkeypatch.setattr(c_library, "multiplies_bf16", lambda: on_all or comm.rank == 0)
    monkeypatch.setattr(mkl, "find", lambda: "not here")
    set_blas_threads(1)
    losses, _, _, sharded = train(comm, precision=Precision(param="bf16"), lr=1e-3, device="numpy")
    assert (sharded.device.products == "bf16") == on_all == ("bfloat16" in sharded.device.about)
    np.testing.assert_allclose(losses, alone(lr=1e-3)[0], rtol=5e-3)


@of_numpy("compiled kernels")
@pytest.mark.parametrize("odd", ["numpy", "avx2"])
def test_all_ranks_take_the_same_kernels(comm, monkeypatch, odd):
    """The best that all have: else replicas, each updated where it is, would drift apart."""
    if odd not in cpu_kernels():
        pytest.skip(f"this processor has no {odd}")
    best = cpu_kernels()
    monkeypatch.setattr(build, "cpu_kernels", lambda: best[: best.index(odd) + 1] if comm.rank == comm.size - 1 else best)
    about = train(comm, steps=1, device="numpy")[3].device.about
    assert about == "numpy" if odd == "numpy" else "avx2" in about
    if odd == "numpy" and len(best) > 1:
        with pytest.raises(ConfigError, match="some ranks have none"):
            train(comm, steps=1, device="numpy", kernels="compiled")


def test_bf16_gathers_exactly_half_the_bytes(comm):
    def gathered(**options):
        sharded = shard(MODELS["gpt2"](), comm, **here(), **options)
        return sharded.step(deal(*batch(0), MICRO, comm.rank, comm.size)).counters
    full, half = gathered(), gathered(precision=Precision(param="bf16", reduce="bf16"), transport="mpi")
    assert 2 * half.bytes_gathered == full.bytes_gathered and 2 * half.bytes_reduced == full.bytes_reduced
    quarter = gathered(precision=Precision(param="bf16", gather="fp8_e4m3"))
    assert quarter.bytes_gathered <= full.bytes_gathered * 0.25 * (1 + 1 / 128) + 4096


@pytest.mark.skipif(STAND_IN, reason="slow: rank_device's test of a scale that overflows")
@pytest.mark.filterwarnings("error")
def test_fp16_gradients_find_their_scale(comm):
    """Sums of token gradients times 2^16 overflow at first: steps are skipped until the scale fits, then all is well."""
    losses, norms, _, sharded = train(comm, steps=24, precision=Precision(param="fp16", reduce="fp16"), transport="mpi", lr=1e-3)
    assert not np.isfinite(norms[0]) and np.isfinite(norms[-6:]).all()
    assert sharded.loss_scale.value < 2.0**16 and np.isfinite(losses).all()


@pytest.mark.filterwarnings("error")
def test_overflow_on_one_rank_is_everybodys(comm):
    sharded = shard(MODELS["gpt2"](), comm, **here(), precision=Precision(param="fp16", reduce="fp16"), transport="mpi")
    optim = AdamW(sharded)
    before, scale = sharded.full_weights(), sharded.loss_scale.value
    for attempt in range(2):
        output = sharded.step(deal(*batch(0), MICRO, comm.rank, comm.size))
        if comm.rank == comm.size - 1:
            sharded.units["head"].gradient[:] = np.inf
        loss, tokens, squares = sharded._totals([], 1)
        broken = type(output)(output.loss, output.tokens, float(np.sqrt(squares)), output.loss_scale, output.counters)
        assert not broken.is_finite and optim.step(broken) == 0.0 and optim.steps == 0
        assert sharded.loss_scale.value == (scale if attempt == 0 else scale / 2)  # hysteresis 2
    for key, value in sharded.full_weights().items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize(("options", "words"), [
    ({"strategy": "zero"}, 'shard.strategy="zero" is not known'),
    ({"strategy": "hybrid", "dp_shard": 3, "dp_replicate": 5}, "is not the number of ranks"),
    ({"strategy": "hybrid", "deterministic": True}, "use full"),
    ({"strategy": "full", "dp_shard": 1}, "use hybrid"),
    ({"accumulate": "unsharded", "deterministic": True}, "needs sharded"),
    ({"unit": "12 apples"}, "is not known"),
    ({"unit": ["no.such.*"]}, "no parameter is called"),
    ({"strategy": "none", "transport": "shm"}, "use auto"),
    ({"reshard_after_forward": 1}, "must be at least 2"), ({"reshard_after_forward": 3}, "use "),
    ({"reshard_after_forward": 2, "transport": "shm"}, "use shard.transport=mpi"),
    ({"reshard_after_forward": 2, "strategy": "grad_op"}, "reshard_after_forward=2 has no effect"),
])
def test_bad_combinations_are_refused_with_a_reason(comm, options, words):
    with pytest.raises(ConfigError, match=words) as error:
        shard(MODELS["gpt2"](), comm, **here(), **options)
    assert "\n" not in str(error.value)
