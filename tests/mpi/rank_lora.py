"""Low-rank adapters: the same logits and gradients as PEFT, training, checkpoints in PEFT's layout, merging.

Directories and expected values come from `tests/golden/make_lora.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpshard.checkpoint import content_of, load_model, load_training, open_on_all, write
from mpshard.checkpoint.manifest import State
from mpshard.checkpoint.merge import export, merge
from mpshard.checkpoint.safetensors_file import parse
from mpshard.config import ConfigError, LoraConfig
from mpshard.device import Kind
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import add_adapters
from mpshard.nn.lora import is_adapter
from mpshard.optim import AdamW
from mpshard.shard import shard
from mpshard.shard.precision import Precision
from tests.models_small import deal
from tests.where import here

RANKS = (1, 3)
ON_STAND_IN = (2,)
TIMEOUT = 240
GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.name for path in (GOLDEN / "lora").iterdir())
SEQUENCES, T, VOCAB = 6, 9, 61


def golden(comm, name, **options):
    return load_model(GOLDEN / "lora" / name, comm, base=GOLDEN / "families" / name, **here(), **options)


def made(comm, name="llama", seed=5, dropout=0.0, **options):
    model = (gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=18, n_heads=2)) if name == "gpt2" else
             llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24)))
    names = {"gpt2": ("c_attn", "mlp.c_proj"), "llama": ("q_proj", "v_proj", "*.layers.1.mlp.*")}[name]
    add_adapters(model, LoraConfig(rank=3, alpha=5.0, targets=names, dropout=dropout))
    return shard(model, comm, seed=seed, **here(), **options)


def run(sharded, optim, steps):
    losses = []
    for step in steps:
        random = np.random.default_rng(step)
        batch = random.integers(VOCAB, size=(2, SEQUENCES, T))
        output = sharded.step(deal(*batch, 1, sharded.mesh.rank, sharded.mesh.world))
        optim.step(output)
        losses.append(output.loss)
    return losses


@pytest.mark.parametrize("options", [{}, {"strategy": "none"}, {"transport": "mpi", "unit": 2, "recompute": "block"}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_peft(comm, name, options):
    sharded = golden(comm, name, **options)
    with np.load(GOLDEN / "lora" / name / "expected.npz") as expected:
        inputs, targets, logits = expected["inputs"], expected["targets"], expected["logits"]
        np.testing.assert_allclose(sharded.logits(inputs), logits, rtol=1e-5, atol=1e-5 * np.abs(logits).max())
        mine = targets if comm.rank == comm.size - 1 else np.full_like(targets, -100)
        output = sharded.step((inputs[None], mine[None]))
        assert output.loss == pytest.approx(float(expected["loss"]), rel=1e-5)
        gradients = sharded.full_gradients()
        wanted = {key.removeprefix("gradient/"): value for key, value in expected.items() if key.startswith("gradient/")}
    assert gradients.keys() == wanted.keys()
    largest = max(np.abs(value).max() for value in wanted.values())
    for key, value in wanted.items():
        np.testing.assert_allclose(gradients[key] / output.tokens, value, rtol=1e-4, atol=5e-6 * largest, err_msg=key)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_training_starts_at_the_model_and_changes_the_adapters_alone(comm, name):
    sharded = made(comm, name)
    plain = shard((gpt2 if name == "gpt2" else llama)(sharded.model.config), comm, seed=5, **here())
    ids = np.arange(2 * T).reshape(2, T)
    np.testing.assert_allclose(sharded.logits(ids), plain.logits(ids), rtol=1e-5, atol=1e-6)
    before, optim = sharded.full_weights(), AdamW(sharded, lr=1e-2)
    losses = run(sharded, optim, [0] * 6)
    assert losses[-1] < losses[0]
    for key, value in sharded.full_weights().items():
        assert np.array_equal(value, before[key]) == (not is_adapter(key)), key
    own = sum(s.size for unit in sharded.units.values() if unit.learns for s in unit.segments)
    assert sharded.device.memory.current(Kind.MOMENT) == 2 * 4 * own
    assert comm.allreduce(own) == sum(p.size for p in sharded.model.parameters if is_adapter(p.name))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_checkpoints_hold_adapters_in_pefts_layout_and_resume_is_exact(comm, shared_tmp_path, name):
    sharded = made(comm, name, dropout=0.2)
    optim = AdamW(sharded, lr=1e-2)
    run(sharded, optim, range(3))
    path = write(comm, shared_tmp_path, content_of(sharded, optim, State(step=3, config={"model.init_from": "base"})), sharded.device)
    assert not list(path.glob("model*"))
    about = json.loads((path / "adapter_config.json").read_text())
    assert (about["peft_type"], about["r"], about["lora_alpha"], about["fan_in_fan_out"]) == ("LORA", 3, 5.0, name == "gpt2")
    with open(path / "adapter_model.safetensors", "rb") as file:
        found = parse(lambda at, n: (file.seek(at), file.read(n))[1], (path / "adapter_model.safetensors").stat().st_size)
    first = "transformer.h.0.attn.c_attn" if name == "gpt2" else "model.layers.0.self_attn.q_proj"
    d = sharded.model.config.d_model
    assert found[f"base_model.model.{first}.lora_A.weight"].shape == (3, d)
    assert found[f"base_model.model.{first}.lora_B.weight"].shape == (3 * d if name == "gpt2" else d, 3)
    assert set(found) == {p.name for p in sharded.model.parameters if is_adapter(p.name)}
    expected = run(sharded, optim, range(3, 6))

    again = made(comm, name, dropout=0.2)
    for unit in again.units.values():
        if unit.learns:
            unit.shard[:] = 7  # all of it comes from the checkpoint
    optim_again = AdamW(again, lr=1e-2)
    load_training(again, optim_again, open_on_all(comm, path))
    assert run(again, optim_again, range(3, 6)) == expected
    for key, value in sharded.full_weights().items():
        np.testing.assert_array_equal(again.full_weights()[key], value, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_a_merged_model_computes_the_same_without_adapters(comm, shared_tmp_path, name):
    sharded = golden(comm, name)
    merge(sharded)
    export(comm, sharded, shared_tmp_path / "merged")
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["merged"]
    merged = load_model(shared_tmp_path / "merged", comm, **here())
    assert not any(is_adapter(p.name) for p in merged.model.parameters)
    with np.load(GOLDEN / "lora" / name / "expected.npz") as expected:
        logits = expected["logits"]
        np.testing.assert_allclose(merged.logits(expected["inputs"]), logits, rtol=1e-5, atol=2e-5 * np.abs(logits).max())
    with pytest.raises(ConfigError, match="exists already"):
        export(comm, sharded, shared_tmp_path / "merged")


def test_adapter_dropout_drops_the_same_forward_and_backward(comm):
    """Gradients with dropout against finite differences of the loss, along one direction, masks held fixed by the key."""
    sharded = made(comm, dropout=0.5, precision=Precision(param="fp64", reduce="fp64", master="fp64"))
    random = np.random.default_rng(comm.rank)
    values = {p.name: np.random.default_rng(list(p.name.encode())).standard_normal(p.size) * 0.3
              for p in sharded.model.parameters if is_adapter(p.name)}
    batch = tuple(part[None] for part in random.integers(VOCAB, size=(2, 2, T)))

    def loss(step):
        for unit in sharded.units.values():
            if unit.learns:
                for s in unit.segments:
                    unit.master.write(s.slice, values[s.name][s.start:s.stop] * (1 + step))
        sharded.publish()
        sharded.steps = 0
        return sharded.step(batch)

    output = loss(0.0)
    gradients = sharded.full_gradients()
    slope = sum(float(gradients[key].ravel() @ value) for key, value in values.items()) / output.tokens
    h = 1e-5
    assert slope == pytest.approx((loss(h).loss - loss(-h).loss) / (2 * h), rel=1e-5)


@pytest.mark.parametrize(("targets", "words"), [(("q_prj",), 'no linear layer is called "q_prj"; the nearest names are q_proj'),
                                                (("q_proj", "embed_tokens"), 'no linear layer is called "embed_tokens"')])
def test_unknown_targets_are_refused(comm, targets, words):
    with pytest.raises(ConfigError) as error:
        add_adapters(llama(LlamaConfig(n_layers=1)), LoraConfig(rank=2, targets=targets))
    assert words in str(error.value)


@pytest.mark.parametrize(("change", "words"), [
    ({"use_dora": True}, "use_dora=true is not supported"), ({"peft_type": "IA3"}, 'peft_type="IA3" is not supported'),
    ({"target_modules": ".*q_proj"}, "a list of names is needed"), ({"r": 5}, "has shape (3, 20), this model's is (5, 20)"),
    ({"target_modules": ["c_attn"]}, "which this model has not"), ({"rank_pattern": {"c_attn": 8}}, "rank_pattern="),
    ({"init_lora_weights": "pissa"}, "init_lora_weights=true, false or gaussian")])
def test_adapters_that_do_not_fit_are_refused(comm, shared_tmp_path, change, words):
    if comm.rank == 0:
        for path in (GOLDEN / "lora" / "gpt2").iterdir():
            (shared_tmp_path / path.name).write_bytes(path.read_bytes())
        content = json.loads((shared_tmp_path / "adapter_config.json").read_text()) | change
        (shared_tmp_path / "adapter_config.json").write_text(json.dumps(content))
    comm.Barrier()
    with pytest.raises(ConfigError) as caught:
        load_model(shared_tmp_path, comm, base=GOLDEN / "families" / "gpt2", **here())
    assert words in str(caught.value) and "\n" not in str(caught.value)
