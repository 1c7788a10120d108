"""Some parameters frozen: the others train as they would, the frozen ones keep every bit and cost nothing but their place."""

from __future__ import annotations

import numpy as np
import pytest

from mpshard.config import ConfigError
from mpshard.device import Kind
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import set_trainable
from mpshard.optim import AdamW
from mpshard.shard import shard
from mpshard.shard.schedule import Backward
from tests.models_small import deal
from tests.where import STAND_IN, here

RANKS = (1, 3)
ON_STAND_IN = (2,)
TIMEOUT = 240
SEQUENCES, T, VOCAB = 6, 9, 61
MICRO = 3 if STAND_IN else 1  # sequences of a micro-batch
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=3, d_model=18, n_heads=2, dropout=0.1)),
    "llama": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=3, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24,
                                       attention_bias=True)),
    "qwen3": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=3, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24,
                                       arch="qwen3", tie_embeddings=True)),
}
MIXES = [
    ("gpt2", ["*.attn.*"]), ("gpt2", ["*.bias"]), ("gpt2", ["*.weight"]), ("gpt2", ["*wpe*", "*ln_f.bias"]), ("gpt2", ["*wte*"]),
    ("gpt2", ["*.h.2.*", "*ln_f*"]), ("gpt2", ["*.h.1.mlp.c_fc.bias"]),
    ("llama", ["*q_proj*"]), ("llama", ["*k_proj.weight", "*v_proj.bias", "*up_proj*"]), ("llama", ["lm_head*"]),
    ("llama", ["*layernorm*"]), ("llama", ["*.layers.1.*q_proj.bias", "*.layers.2.*.gate_proj.weight"]),
    ("qwen3", ["*k_norm*"]), ("qwen3", ["*.layers.0.*q_norm*"]), ("qwen3", ["model.norm*", "*v_proj*"]),
]


def batch(step):
    random = np.random.default_rng(step)
    return random.integers(VOCAB, size=(SEQUENCES, T)), random.integers(VOCAB, size=(SEQUENCES, T))


def made(comm, name, patterns, **options):
    model = MODELS[name]()
    if patterns:
        set_trainable(model, patterns)
    sharded = shard(model, comm, seed=5, **here(), **options)
    sharded.load(lambda name, start, stop: spread(name, start, stop))
    return sharded


def spread(name, start, stop):
    """Weights that leave no gradient near zero, biases included."""
    values = np.random.default_rng(list(name.encode())).standard_normal(stop)[start:].astype(np.float32)
    return values * 0.3 + ("norm" in name or "ln_" in name)


def gradients(sharded, comm):
    sharded.step(deal(*batch(0), MICRO, comm.rank, comm.size))
    return sharded.full_gradients()


@pytest.mark.parametrize(("name", "patterns"), MIXES, ids=str)
def test_any_mix_has_the_gradients_of_the_whole_and_keeps_the_frozen(comm, name, patterns):
    """Dropout is on: what is left out of backward must not shift the masks of what is not."""
    expected = gradients(made(comm, name, []), comm)
    sharded = made(comm, name, patterns)
    learning = {p.name for p in sharded.model.parameters if p.trainable}
    assert learning and len(learning) < len(expected)
    found = gradients(sharded, comm)
    assert found.keys() == learning
    for key in learning:
        np.testing.assert_allclose(found[key], expected[key], rtol=2e-4, atol=2e-5 * np.abs(expected[key]).max(), err_msg=key)
    before, optim = sharded.full_weights(), AdamW(sharded, lr=1e-2)
    for step in range(2):
        optim.step(sharded.step(deal(*batch(step), MICRO, comm.rank, comm.size)))
    for key, value in sharded.full_weights().items():
        assert np.array_equal(value, before[key]) == (key not in learning), key


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"strategy": "optim"}, {"transport": "mpi", "unit": 2, "recompute": "block"},
                                     {"unit": ["*q_proj*", "*bias"], "recompute": "none"}, {"accumulate": "unsharded"}], ids=str)
def test_frozen_under_every_strategy(comm, options):
    patterns = ["*q_proj*", "*layers.2*norm*", "*up_proj*"]
    expected = gradients(made(comm, "llama", []), comm)
    for key, value in gradients(made(comm, "llama", patterns, **options), comm).items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-4, atol=2e-5 * np.abs(expected[key]).max(), err_msg=key)


def test_fused_parameters_may_lie_in_several_units(comm):
    units = "block", ["*q_proj*", "*.gate_proj*", "*k_proj.bias"]
    expected, found = (gradients(made(comm, "llama", [], unit=unit), comm) for unit in units)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=2e-5 * np.abs(value).max(), err_msg=key)


def test_frozen_parameters_cost_no_gradient_and_no_moments(comm):
    sharded = made(comm, "llama", ["*.layers.1.*"], transport="mpi")
    optim = AdamW(sharded)
    memory = sharded.device.memory
    memory.reset_peak()
    sharded.step(deal(*batch(0), 1, comm.rank, comm.size))
    learning = [unit for unit in sharded.units.values() if unit.learns]
    assert [unit.name for unit in learning] == ["layers.1"]
    assert memory.current(Kind.MOMENT) == 2 * 4 * sum(s.size for s in learning[0].segments) and optim.steps == 0
    assert memory.current(Kind.GRADIENT) == learning[0].shard.nbytes
    assert memory.peak(Kind.FULL_GRADIENT) == 4 * learning[0].layout.padded_size
    assert sharded.step(deal(*batch(0), 1, comm.rank, comm.size)).counters.bytes_reduced == (
        SEQUENCES // comm.size * learning[0].shard.nbytes * (comm.size - 1))


def test_nothing_runs_backward_before_the_first_that_learns(comm):
    sharded = made(comm, "gpt2", ["*.h.1.attn.*"])
    program = sharded._program(1).program
    assert [i.stage for i in program if isinstance(i, Backward)] == ["head", "layers.2", "layers.1"]
    products = sharded.device.matmul
    calls = []
    sharded.device.matmul = lambda a, b, out=None, **more: (calls.append(out is None), products(a, b, out, **more))[1]
    sharded.engine.poll = lambda: None
    sharded.step(deal(*(part[:comm.size] for part in batch(0)), 1, comm.rank, comm.size))
    # Forward 4 products of each block. Backward of layers.2 4, for inputs alone; of layers.1 3 for inputs (not that of its
    # first, before which nothing learns) and 2 for weights; of the loss the logits and the gradient of the head's input.
    assert calls.count(True) == 3 * 4 + 4 + 3 and calls.count(False) == 2 + 2


@pytest.mark.parametrize(("patterns", "words"), [(["*.atn.*"], 'no parameter is called "*.atn.*"; the nearest names are attn'),
                                                 (["*wte*", "zzz"], 'no parameter is called "zzz"')])
def test_unknown_patterns_are_refused(comm, patterns, words):
    with pytest.raises(ConfigError) as error:
        set_trainable(MODELS["gpt2"](), patterns)
    assert words in str(error.value)


def test_a_model_of_which_nothing_learns_is_refused(comm):
    model = MODELS["gpt2"]()
    for parameter in model.parameters:
        parameter.trainable = False
    with pytest.raises(ConfigError, match="nothing in the model is trainable"):
        shard(model, comm)
