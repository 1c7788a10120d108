"""Optimizers on slices against plain formulas on whole tensors, at any cut; their checkpoints; the running average."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpshard.checkpoint import content_of, load_model, load_training, open_on_all, write
from mpshard.checkpoint.manifest import State
from mpshard.config import ConfigError
from mpshard.device import Kind
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.optim import SGD, AdamW, Muon, decays
from mpshard.shard import shard
from tests.models_small import deal
from tests.where import STAND_IN, here

RANKS = (4,)  # of uneven slices test_optim knows all numbers of ranks
ON_STAND_IN = (2,)
TIMEOUT = 240
SEQUENCES, T, VOCAB = 12, 7, 53
MICRO, OF_8, STEPS = (6, 2, 2) if STAND_IN else (1, 1, 4)  # sequences of a micro-batch, of all and of 8; the stand-in takes its time
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=14, n_heads=2)),
    "llama": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, d_ff=20)),
}
OPTIMIZERS = {
    "adamw": lambda s, **o: AdamW(s, lr=1e-2, **o), "sgd": lambda s, **o: SGD(s, lr=1e-1, weight_decay=0.1, **o),
    "muon": lambda s, **o: Muon(s, lr=1e-2, **o), "jordan": lambda s, **o: Muon(s, lr=1e-3, lr_factor=20, scale="jordan", **o),
}


def batch(step):
    random = np.random.default_rng(step)
    return random.integers(VOCAB, size=(SEQUENCES, T)), random.integers(VOCAB, size=(SEQUENCES, T))


def made(comm, name="gpt2", optimizer="adamw", seed=3, deterministic=False, optim=None, **options):
    sharded = shard(MODELS[name](), comm, seed=seed, **here(), deterministic=deterministic, **options)
    return sharded, OPTIMIZERS[optimizer](sharded, **(optim or {}))


def run(sharded, optim, steps, after=lambda: None):
    losses = []
    for step in steps:
        output = sharded.step(deal(*batch(step), MICRO, sharded.mesh.rank, sharded.mesh.world))
        optim.step(output)
        after()
        losses.append(output.loss)
    return losses


# -- formulas --------------------------------------------------------------------------------
def jordans_direction(g):
    """zeropower_via_newtonschulz5 as published, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Formula:
    """What an optimizer should make of whole weights and mean gradients, in float64."""

    def __init__(self, model, optimizer, weights):
        self.optimizer, self.t = optimizer, 0
        self.w = {name: w.astype(np.float64) for name, w in weights.items()}
        self.m, self.v = ({name: np.zeros(w.shape) for name, w in weights.items()} for _ in range(2))
        self.of = {p.name: p for p in model.parameters}
        self.matrices = {p.name for module in model.modules[1:-1] for p in module.parameters if len(p.shape) == 2}

    def step(self, gradients, clip):
        self.t += 1
        for name, g in gradients.items():
            g, w, decay = g * clip, self.w[name], 0.1 * decays(self.of[name])
            if self.optimizer == "sgd":
                self.m[name] = 0.9 * self.m[name] + g
                w *= 1 - 0.1 * decay
                w -= 0.1 * self.m[name]
            elif self.optimizer in ("muon", "jordan") and name in self.matrices:
                self.m[name] = 0.95 * self.m[name] + 0.05 * g
                u = 0.05 * g + 0.95 * self.m[name]
                out, into = reversed(u.shape) if self.of[name].transposed else u.shape
                lr, scale = (1e-2, 0.2 * math.sqrt(max(out, into))) if self.optimizer == "muon" else (2e-2, math.sqrt(max(1, out / into)))
                w *= 1 - lr * decay
                w -= lr * scale * jordans_direction(u)
            else:
                lr = 1e-3 if self.optimizer == "jordan" else 1e-2
                self.m[name], self.v[name] = 0.9 * self.m[name] + 0.1 * g, 0.95 * self.v[name] + 0.05 * g * g
                w *= 1 - lr * decay
                w -= lr * self.m[name] / (1 - 0.9**self.t) / (np.sqrt(self.v[name] / (1 - 0.95**self.t)) + 1e-8)


CUTS = [{}, {"transport": "mpi", "unit": 2}, {"strategy": "none"}, {"strategy": "hybrid", "dp_replicate": 2},
        {"strategy": "optim", "unit": ["*.mlp.*"]}]


@pytest.mark.parametrize(("optimizer", "cut"), [(optimizer, cut) for optimizer in OPTIMIZERS for cut in CUTS
                                                if not STAND_IN or not cut or optimizer == "muon"], ids=str)
def test_slices_are_updated_as_the_formula_updates_whole_tensors(comm, optimizer, cut):
    if comm.size % cut.get("dp_replicate", 1):
        pytest.skip("the ranks cannot be cut so")
    sharded, optim = made(comm, "gpt2" if optimizer != "muon" else "llama", optimizer, **cut)
    formula = Formula(sharded.model, optimizer, sharded.full_weights())
    for step in range(STEPS):
        output = sharded.step(deal(*batch(step), MICRO, comm.rank, comm.size))
        gradients = sharded.full_gradients()
        clip = optim.step(output)
        formula.step({name: g.astype(np.float64) / output.tokens for name, g in gradients.items()}, clip)
    for name, found in sharded.full_weights().items():
        np.testing.assert_allclose(found, formula.w[name], rtol=1e-4, atol=2e-6, err_msg=name)


def test_muon_is_the_same_on_any_number_of_ranks(comm):
    if comm.size & (comm.size - 1):
        pytest.skip("needs a power of two")
    from mpi4py import MPI

    def weights(on, **options):  # 8 sequences: micro-batches must be a power of two, too
        sharded, optim = made(on, "llama", "muon", deterministic=True, **options)
        for step in range(4, 4 + STEPS):
            inputs, targets = batch(step)
            optim.step(sharded.step(deal(inputs[:8], targets[:8], OF_8, on.rank, on.size)))
        return sharded.full_weights()

    alone = weights(MPI.COMM_SELF)
    for options in ({}, {"strategy": "none"}, {"unit": 2, "transport": "mpi"}):
        for name, value in weights(comm, **options).items():
            np.testing.assert_array_equal(value, alone[name], err_msg=f"{options} {name}")


def test_muon_keeps_one_moment_of_a_matrix(comm):
    sharded, optim = made(comm, "llama", "muon")
    held = sum(s.size * (1 if s.name in optim.shapes else 2) for unit in sharded.units.values() for s in unit.segments)
    assert sharded.device.memory.current(Kind.MOMENT) == 4 * held


# -- 16-bit moments ----------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_short_moments_train_nearly_alike_and_take_half(comm, optimizer):
    sharded, optim = made(comm, "llama", optimizer)
    steps = range(3 if STAND_IN else 10)
    full, whole = run(sharded, optim, steps), sharded.device.memory.current(Kind.MOMENT)
    sharded_short, short = made(comm, "llama", optimizer, optim={"moments": "bf16"})
    both = sharded_short.device.memory.current(Kind.MOMENT) + (0 if sharded_short.device is sharded.device else whole)
    assert (both - whole) * 2 == whole
    losses = run(sharded_short, short, steps)
    assert losses != full
    np.testing.assert_allclose(losses, full, rtol=5e-3)


def test_short_moments_do_not_depend_on_the_cut(comm):
    if comm.size & (comm.size - 1):
        pytest.skip("needs a power of two")
    from mpi4py import MPI

    def weights(on, **options):
        sharded, optim = made(on, deterministic=True, optim={"moments": "bf16"}, **options)
        for step in range(STEPS):
            inputs, targets = batch(step)
            optim.step(sharded.step(deal(inputs[:8], targets[:8], OF_8, on.rank, on.size)))
        return sharded.full_weights()

    alone = weights(MPI.COMM_SELF)
    for name, value in weights(comm, unit=2).items():
        np.testing.assert_array_equal(value, alone[name], err_msg=name)


# -- the running average -------------------------------------------------------------------------
def test_the_average_is_the_formula(comm):
    sharded, optim = made(comm, optim={"ema": 0.7})
    seen = []
    run(sharded, optim, range(5), after=lambda: seen.append(sharded.full_weights()))
    expected = seen[0]
    for weights in seen[1:]:
        expected = {name: 0.7 * expected[name] + 0.3 * w for name, w in weights.items()}
    with optim.average.in_place():
        inside = sharded.full_weights()
        loss, _ = sharded.evaluate([batch(0)])
    for name, value in sharded.full_weights().items():
        np.testing.assert_allclose(inside[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
        np.testing.assert_array_equal(value, seen[-1][name])  # the weights are back, bit for bit
    assert loss != sharded.evaluate([batch(0)])[0]


# -- checkpoints -----------------------------------------------------------------------------------
KINDS = [("adamw", {}), ("adamw", {"moments": "bf16", "ema": 0.9}), ("sgd", {}), ("sgd", {"momentum": 0.0}), ("muon", {}),
         ("muon", {"moments": "bf16", "ema": 0.9})]
if STAND_IN:
    KINDS = KINDS[1::4]  # all that an optimizer can keep


@pytest.mark.parametrize(("optimizer", "settings"), KINDS, ids=str)
@pytest.mark.parametrize("averaged", [False, True])
def test_resume_is_exact(comm, shared_tmp_path, optimizer, settings, averaged):
    if averaged and "ema" not in settings:
        pytest.skip("nothing to average")
    sharded, optim = made(comm, "llama", optimizer, optim=settings)
    run(sharded, optim, range(3))
    content = content_of(sharded, optim, State(step=3), averaged=averaged)
    path = write(comm, shared_tmp_path, content, sharded.device)
    expected = run(sharded, optim, range(3, 6))

    again, optim_again = made(comm, "llama", optimizer, seed=99, optim=settings)
    load_training(again, optim_again, open_on_all(comm, path))
    again.seed = sharded.seed
    if settings.get("moments") == "bf16":  # the seed of the rounding is the run's, as the config says
        for moments in [*optim_again.moments.values(), *getattr(optim_again, "buffers", {}).values()]:
            moments.seed = sharded.seed
    assert run(again, optim_again, range(3, 6)) == expected
    found, wanted = again.full_weights(), sharded.full_weights()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_the_average_can_be_what_is_saved(comm, shared_tmp_path):
    sharded, optim = made(comm, "llama", optim={"ema": 0.5})
    run(sharded, optim, range(3))
    path = write(comm, shared_tmp_path, content_of(sharded, optim, State(step=3), averaged=True), sharded.device)
    with optim.average.in_place():
        expected = sharded.full_weights()
    for name, value in load_model(path, comm, **here()).full_weights().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_another_optimizers_checkpoint_is_refused(comm, shared_tmp_path):
    sharded, optim = made(comm, "llama", "adamw")
    path = write(comm, shared_tmp_path, content_of(sharded, optim, State(step=0)), sharded.device)
    again, other = made(comm, "llama", "sgd")
    with pytest.raises(ConfigError, match="lacks momentum_buffer"):
        load_training(again, other, open_on_all(comm, path))


@pytest.mark.parametrize(("make", "words"), [
    (lambda s: AdamW(s, moments="fp8"), "optim.moments='fp8' is not known"), (lambda s: AdamW(s, ema=1.0), "optim.ema=1.0 must be"),
    (lambda s: Muon(s, scale="large"), "use moonshot, jordan")])
def test_wrong_choices_are_refused(comm, make, words):
    with pytest.raises(ConfigError, match=words):
        make(shard(MODELS["gpt2"](), comm, **here()))
