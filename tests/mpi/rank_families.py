"""Directories as transformers writes them, of every family: the same logits, loss and gradients as it computes.

The directories and what is expected of them come from `tests/golden/make_families.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpshard.checkpoint import load_model
from mpshard.config import ConfigError
from tests.where import here

RANKS = (1, 3)
ON_STAND_IN = (2,)
FAMILIES = Path(__file__).parent.parent / "golden" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())


def close(actual, expected, what, rtol=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * np.abs(expected).max(), err_msg=what)


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_transformers(comm, name):
    sharded = load_model(FAMILIES / name, comm, **here())
    with np.load(FAMILIES / name / "expected.npz") as expected:
        inputs, targets = expected["inputs"], expected["targets"]
        close(sharded.logits(inputs), expected["logits"], "logits")
        # The whole batch on one rank, nothing to learn on the others.
        mine = targets if comm.rank == comm.size - 1 else np.full_like(targets, -100)
        output = sharded.step((inputs[None], mine[None]))
        assert output.tokens == (targets != -100).sum()
        close(output.loss, expected["loss"], "loss")
        gradients = sharded.full_gradients()
        wanted = {key.removeprefix("gradient/"): value for key, value in expected.items() if key.startswith("gradient/")}
    assert gradients.keys() == wanted.keys()
    largest = max(np.abs(value).max() for value in wanted.values())
    for key, value in wanted.items():
        np.testing.assert_allclose(gradients[key] / output.tokens, value, rtol=1e-4, atol=5e-6 * largest, err_msg=key)
    sharded.close()


def test_every_rank_reads_its_own_ranges_only(comm, monkeypatch):
    from mpshard.comm.files import SharedFile

    read, read_at_all = [], SharedFile.read_at_all

    def spy(self, offset, buffer):
        read.append(buffer.nbytes)
        return read_at_all(self, offset, buffer)

    monkeypatch.setattr(SharedFile, "read_at_all", spy)
    sharded = load_model(FAMILIES / "qwen3", comm, **here())
    assert sum(read) == 2 * sum(segment.size for unit in sharded.units.values() for segment in unit.segments)  # bf16


@pytest.mark.parametrize(("change", "words"), [
    (lambda c: c.update(hidden_size=22), "model.embed_tokens.weight has shape (61, 20), this model's is (61, 22)"),
    (lambda c: c.update(num_hidden_layers=3), "lacks model.layers.2."),
    (lambda c: c.update(num_hidden_layers=1), "has model.layers.1."),
    (lambda c: c.update(model_type="gemma3"), 'model_type="gemma3" is not supported; there are gpt2, llama,'),
    (lambda c: c.update(tie_word_embeddings=True), None),  # then lm_head.weight is a copy, as in transformers
])
def test_what_does_not_fit_is_refused_on_every_rank(comm, shared_tmp_path, change, words):
    folder = shared_tmp_path / "model"
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(FAMILIES / "mistral", folder)
        content = json.loads((folder / "config.json").read_text())
        change(content)
        (folder / "config.json").write_text(json.dumps(content))
    comm.Barrier()
    if words is None:
        return load_model(folder, comm, **here()).close()
    with pytest.raises(ConfigError) as caught:
        load_model(folder, comm, **here())
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert len(set(comm.allgather(str(caught.value)))) == 1
