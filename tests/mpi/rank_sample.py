"""Sampling and packing on every number of ranks: kept keys and values change nothing, packed neighbours neither."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpshard.checkpoint import load_model
from mpshard.config import ConfigError
from mpshard.data.packing import PackedBatches
from mpshard.data.records import Document
from mpshard.nn import Cache
from mpshard.sample import Sampling, context, draw, generate
from tests.where import here

RANKS = (1, 3)
ON_STAND_IN = (3,)

FAMILIES = Path(__file__).parent.parent / "golden" / "families"
GREEDY = Sampling(temperature=0)


def model(comm, name):
    return load_model(FAMILIES / name, comm, **here())


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "llama3"])
def test_with_kept_keys_and_values_the_logits_are_the_same(comm, name):
    sharded = model(comm, name)
    ids = np.load(FAMILIES / name / "expected.npz")["inputs"]
    whole, cache = sharded.logits(ids), Cache(ids.shape[1])
    for start, stop in [(0, 5), (5, 6), (6, 9), (9, 12)]:  # a prompt, one token, several
        part = sharded.logits(ids[:, start:stop], cache)
        np.testing.assert_allclose(part, whole[:, start:stop], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(sharded.logits(ids, last_only=True), whole[:, -1:], rtol=2e-5, atol=2e-5)
    sharded.close()


def test_greedy_continuation_is_the_likeliest_token_each_time(comm):
    sharded = model(comm, "smollm2")
    seen: list[int] = []
    ids = generate(sharded, [3, 1, 4], 20, GREEDY, seen=seen.append)
    assert len(set(map(tuple, comm.allgather(ids)))) == 1 and ids[:3] == [3, 1, 4] and ids[3:] == seen
    for end in range(3, 23):
        assert sharded.logits(np.array([ids[:end]]))[0, -1].argmax() == ids[end]
    stop = ids[7]
    assert generate(sharded, [3, 1, 4], 20, GREEDY, stop={stop}) == ids[:ids.index(stop, 3) + 1]
    sharded.close()


def test_past_the_context_the_newer_half_is_read_again(comm):
    sharded = model(comm, "mistral")
    assert context(sharded) == 16  # its sliding window, which is shorter than its 32 positions
    ids = generate(sharded, [1, 2, 3, 4, 5], 30, GREEDY)
    # From what has been read, 5 to 16 tokens, comes the next; then from the last 8, 9, ... 16, and again.
    starts = [0] * 12 + [9] * 9 + [18] * 9
    for end, start in zip(range(5, 35), starts, strict=True):
        assert sharded.logits(np.array([ids[start:end]]))[0, -1].argmax() == ids[end]
    longer = generate(sharded, list(range(40)), 2, GREEDY)
    assert longer[40] == sharded.logits(np.array([list(range(24, 40))]))[0, -1].argmax()
    sharded.close()


def test_draws_depend_on_the_seed_alone(comm):
    sharded = model(comm, "gpt2_hub")
    warm = [generate(sharded, [7], 12, Sampling(temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    assert generate(sharded, [7], 12, Sampling(temperature=1.5, top_k=1)) == generate(sharded, [7], 12, GREEDY)
    sharded.close()


def test_top_k_and_top_p():
    logits = np.log([0.1, 0.4, 0.3, 0.2])

    def shares(**cut) -> np.ndarray:
        random = np.random.default_rng(0)
        drawn = [draw(logits, Sampling(**cut), random) for _ in range(4000)]
        return np.bincount(drawn, minlength=4) / 4000

    np.testing.assert_allclose(shares(), [0.1, 0.4, 0.3, 0.2], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [0, 4 / 7, 3 / 7, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.75), [0, 4 / 9, 3 / 9, 2 / 9], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.7), [0, 4 / 7, 3 / 7, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=0.5), np.array([1, 16, 9, 4]) / 30, atol=0.03)
    with pytest.raises(ConfigError, match="top_p=0 must be above 0 and at most 1"):
        Sampling(top_p=0)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_packed_documents_learn_as_if_alone(comm, name):
    """Loss and gradients of packed rows equal those of each document in a row of its own."""
    random = np.random.default_rng(5)
    documents = [Document(random.integers(61, size=n), random.random(n) < 0.7) for n in (9, 4, 7, 12, 3, 5, 6)]
    results = []
    for alone in (False, True):
        sharded = model(comm, name)
        if alone:
            rows = -(-len(documents) // comm.size) * comm.size
            inputs, targets = np.zeros((rows, 12), np.int64), np.full((rows, 12), -100)
            for row, (ids, learn) in enumerate(documents):
                inputs[row, :len(ids) - 1] = ids[:-1]
                targets[row, :len(ids) - 1] = np.where(learn[1:], ids[1:], -100)
            batch = (inputs[comm.rank::comm.size, None], targets[comm.rank::comm.size, None])
        else:
            packed = PackedBatches(documents, 12, 61)
            batch = [np.concatenate(parts) for parts in zip(*packed.eval_batches(comm.rank, comm.size, 1), strict=True)]
        output = sharded.step(batch)
        loss, tokens = sharded.evaluate([[part[m] for part in batch] for m in range(len(batch[0]))])
        np.testing.assert_allclose(loss, output.loss, rtol=1e-5)
        results.append((output, sharded.full_gradients()))
        sharded.close()
    (packed, gradients), (alone, expected) = results
    assert packed.tokens == alone.tokens
    np.testing.assert_allclose(packed.loss, alone.loss, rtol=1e-5)
    for key, value in expected.items():
        np.testing.assert_allclose(gradients[key], value, rtol=1e-3, atol=1e-5 * max(1, np.abs(value).max()), err_msg=key)
