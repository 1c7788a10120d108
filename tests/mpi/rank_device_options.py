"""Optimizers, averages, frozen parameters and adapters on the stand-in for CuPy: the same losses as on NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from mpshard.config import LoraConfig
from mpshard.device import open_device
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import add_adapters, set_trainable
from mpshard.optim import SGD, AdamW, Muon
from mpshard.shard import shard
from mpshard.shard.precision import Precision
from tests.device import cuda_on_cpu, lazy_cupy
from tests.models_small import deal

RANKS = (2,)
TIMEOUT = 300
pytestmark = [pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),
              pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))]
SEQUENCES, T, VOCAB = 4, 9, 61
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=32, n_heads=2)),
    "llama": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=32, n_heads=2, n_kv_heads=1, d_ff=48)),
}


def lora(model, **options):
    add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "v_proj", "down_proj", "c_attn")[:3] if "lm_head.weight" in
                                   {p.name for p in model.parameters} else ("c_attn", "mlp.c_proj"), **options))


CASES = {
    "sgd": ("gpt2", None, lambda s: SGD(s, lr=0.1), {}),
    "muon": ("llama", None, lambda s: Muon(s, lr=1e-2), {}),
    "bf16 moments": ("gpt2", None, lambda s: AdamW(s, lr=1e-2, moments="bf16"), {}),
    "average": ("gpt2", None, lambda s: AdamW(s, lr=1e-2, ema=0.5), {}),
    "frozen": ("llama", lambda m: set_trainable(m, ["*k_proj*", "*layers.1.*norm*", "*up_proj*"]), lambda s: AdamW(s, lr=1e-2), {}),
    "lora": ("llama", lora, lambda s: AdamW(s, lr=1e-2), {}),
    "lora, dropout": ("gpt2", lambda m: lora(m, dropout=0.3), lambda s: AdamW(s, lr=1e-2), {}),
    "lora, 16 bits": ("llama", lora, lambda s: AdamW(s, lr=1e-2), {"precision": Precision("bf16", reduce="bf16")}),
}


def losses(comm, device, name, change, optimizer, options):
    model = MODELS[name]()
    if change is not None:
        change(model)
    sharded = shard(model, comm, device=device, seed=1, **options)
    optim = optimizer(sharded)
    found = []
    for step in range(4):
        batch = np.random.default_rng(step).integers(VOCAB, size=(2, SEQUENCES, T))
        output = sharded.step(deal(*batch, 1, comm.rank, comm.size))
        optim.step(output)
        found.append(output.loss)
    if optim.average is not None:
        with optim.average.in_place():
            found.append(sharded.evaluate([tuple(batch)])[0])
    sharded.close()
    return found


@pytest.mark.parametrize("case", CASES)
def test_equal_to_numpy(comm, case):
    name, change, optimizer, options = CASES[case]
    expected = losses(comm, open_device("numpy"), name, change, optimizer, options)
    with lazy_cupy.installed():
        found = losses(comm, open_device("cupy", poison=True), name, change, optimizer, {**options, "cuda_aware": "yes"})
    np.testing.assert_allclose(found, expected, rtol=2e-3 if "precision" in options else 2e-5 if case != "bf16 moments" else 1e-4)
