"""Weights' gradients made after those of the inputs: the same bits, for every kind of block, and only where a program says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import mpshard as mps
from mpshard.config import LoraConfig
from mpshard.nn.lora import add_adapters
from mpshard.shard.schedule import Weights, training_program

CONFIGS = {
    "gpt2": mps.GPT2Config(vocab_size=31, max_seq_len=8, n_layers=3, d_model=16, n_heads=2, dropout=0.0),
    "llama": mps.LlamaConfig(vocab_size=31, max_seq_len=8, n_layers=3, d_model=16, n_heads=4, n_kv_heads=2, dropout=0.0),
}


TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "down_proj"]}


def gradients(name, weights_last, recompute="pointwise", lora=False, dropout=0.0):
    config = replace(CONFIGS[name], dropout=dropout)
    model = (mps.models.gpt2 if name == "gpt2" else mps.models.llama)(config)
    if lora:
        add_adapters(model, LoraConfig(rank=2, dropout=0.1, targets=tuple(TARGETS[name])))
    sharded = mps.shard(model, device="numpy", recompute=recompute)
    sharded.device.poison = True
    if weights_last:
        program = training_program(sharded.stages, 2, 1, weights_last=True)
        assert lora or sum(isinstance(i, Weights) for i in program) == 1
        sharded._programs[2] = sharded.engine.prepare(program)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 2, 9))
    output = sharded.step((tokens[..., :-1], tokens[..., 1:]))
    return output.loss, output.grad_norm, sharded.full_gradients()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("settings", [{}, {"dropout": 0.1}, {"recompute": "none"}, {"recompute": "block"}, {"lora": True}])
def test_not_a_bit_changes(name, settings):
    *numbers, ours = gradients(name, True, **settings)
    *others, theirs = gradients(name, False, **settings)
    assert numbers == others and ours.keys() == theirs.keys()
    for parameter, gradient in ours.items():
        assert_array_equal(gradient, theirs[parameter], err_msg=parameter)
