"""Batches do not depend on the number of ranks; evaluation sees every token once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.config import ConfigError
from mpshard.data.batches import Batches
from mpshard.data.sampler import sample_ids
from mpshard.data.tokens import Tokens, array_piece


def counting(n_tokens, seq_len, **options):
    """A corpus whose token i is i, so that a batch shows where it comes from."""
    return Batches(Tokens([array_piece("count", np.arange(n_tokens))], n_tokens), seq_len, **options)


def test_targets_are_inputs_shifted_by_one():
    batch = counting(101, 7, seed=5).step_batch(0, 6, 2, rank=0, world=1)
    assert batch.inputs.shape == batch.targets.shape == (3, 2, 7)
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    assert batch.inputs.flags.c_contiguous and batch.targets.flags.c_contiguous
    np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
    expected = sample_ids(np.arange(6), 14, 5) * 7
    np.testing.assert_array_equal(batch.inputs[..., 0].ravel(), expected)


def test_without_a_seed_samples_come_as_they_lie():
    batches = counting(31, 5, seed=None)
    starts = [batches.step_batch(position, 4, 1, rank, 2).inputs[:, 0, 0].tolist() for position in (0, 4) for rank in (0, 1)]
    assert starts == [[0, 10], [5, 15], [20, 0], [25, 5]]  # and from the start again


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_global_micro_batches_do_not_depend_on_the_world(world):
    batches = counting(1000, 9, seed=1)
    alone = batches.step_batch(120, 24, 2, rank=0, world=1)
    for rank in range(world):
        part = batches.step_batch(120, 24, 2, rank, world)
        np.testing.assert_array_equal(part.inputs, alone.inputs[rank::world])
        np.testing.assert_array_equal(part.targets, alone.targets[rank::world])


@given(n_tokens=st.integers(3, 200), seq_len=st.integers(1, 9), steps=st.integers(1, 30))
def test_every_sample_once_an_epoch(n_tokens, seq_len, steps):
    batches = counting(max(n_tokens, seq_len + 1), seq_len)
    starts = np.concatenate([batches.step_batch(4 * s, 4, 2, 0, 1).inputs[..., 0].ravel() for s in range(steps)])
    seen = np.bincount(starts // seq_len, minlength=batches.n_samples)
    assert len(seen) == batches.n_samples and seen.max() - seen.min() <= 1


def test_a_batch_that_does_not_divide():
    with pytest.raises(ValueError, match="do not fill"):
        counting(100, 5).step_batch(0, 10, 2, rank=0, world=3)


def test_corpora_too_short():
    with pytest.raises(ConfigError, match=r"data.train has 5 tokens, under data.seq_len \+ 1 = 9; lower seq_len"):
        counting(5, 8, name="data.train").step_batch(0, 1, 1, 0, 1)
    with pytest.raises(ConfigError, match="data.eval has 1 tokens"):
        counting(1, 8, name="data.eval")


@given(
    n_tokens=st.integers(2, 150), seq_len=st.integers(1, 9), micro=st.integers(1, 4), world=st.integers(1, 4)
)
def test_evaluation_sees_every_target_once(n_tokens, seq_len, micro, world):
    batches = counting(n_tokens, seq_len)
    by_rank = [list(batches.eval_batches(rank, world, micro)) for rank in range(world)]
    assert len({len(part) for part in by_rank}) == 1
    targets = []
    for batch in sum(by_rank, []):
        assert batch.inputs.shape == batch.targets.shape == (1, micro, seq_len)
        valid = batch.targets != -100
        np.testing.assert_array_equal(batch.inputs[valid] + 1, batch.targets[valid])
        assert (batch.inputs[~valid] == 0).all()
        targets += batch.targets[valid].tolist()
    assert sorted(targets) == list(range(1, n_tokens))


@pytest.mark.parametrize("limit", [1, 3, 10, 99])
def test_limited_evaluation_is_spread_and_the_same_for_every_world(limit):
    batches = counting(105, 5, ignore_index=-1)  # 21 windows, 11 micro-batches of 2
    reference = None
    for world in (1, 2, 3):
        parts = sum((list(batches.eval_batches(rank, world, 2, limit)) for rank in range(world)), [])
        starts = sorted(int(p.inputs[0, 0, 0]) for p in parts if (p.targets != -1).any())
        reference = reference or starts
        assert starts == reference and len(starts) == min(limit, 11)
    if limit == 3:
        assert reference == [0, 30, 70]
