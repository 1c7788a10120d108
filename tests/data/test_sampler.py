"""The sample order: every sample once an epoch, a different order each epoch and seed, nothing but arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.data.sampler import sample_ids


@given(n=st.integers(1, 700), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**20))
def test_an_epoch_holds_every_sample_once(n, seed, epoch):
    ids = sample_ids(np.arange(epoch * n, (epoch + 1) * n), n, seed)
    np.testing.assert_array_equal(np.sort(ids), np.arange(n))


@given(n=st.integers(1, 2**61), start=st.integers(0, 2**62 - 20), seed=st.integers(0, 2**63 - 1))
def test_any_position_alone_or_together(n, start, seed):
    positions = np.arange(start, start + 9)
    together = sample_ids(positions, n, seed)
    assert together.dtype == np.int64 and ((together >= 0) & (together < n)).all()
    assert [int(sample_ids(p, n, seed)) for p in positions] == together.tolist()
    np.testing.assert_array_equal(sample_ids(positions.reshape(3, 3), n, seed), together.reshape(3, 3))


def test_epochs_and_seeds_differ():
    n = 1000
    orders = [sample_ids(np.arange(e * n, (e + 1) * n), n, seed) for seed in (0, 1) for e in (0, 1)]
    # Two random permutations agree in 1 place on average; 20 or more has probability below 1e-18 (Poisson(1)).
    for i, a in enumerate(orders):
        for b in [*orders[:i], np.arange(n)]:
            assert (a == b).sum() < 20


def test_small_epochs_reach_all_orders():
    orders = {tuple(sample_ids(np.arange(3 * e, 3 * e + 3), 3, 0)) for e in range(200)}
    assert len(orders) == 6


def test_order_looks_random():
    """Mean and lag correlation of a permutation of n: within 5 standard deviations, 1/sqrt(12 n) and 1/sqrt(n)."""
    n = 10007
    ids = sample_ids(np.arange(n), n, 3) / n - 0.5
    first_half = ids[: n // 2]
    assert abs(first_half.mean()) < 5 / np.sqrt(12 * n / 2)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 5 / np.sqrt(n)


def test_order_is_the_same_in_every_version():
    """A resume must find the order it left: recorded from this implementation, to change only on purpose."""
    assert sample_ids(np.arange(12), 10, 1234).tolist() == [7, 8, 1, 9, 5, 2, 6, 0, 3, 4, 6, 0]


def test_no_samples():
    with pytest.raises(ValueError, match="at least one sample"):
        sample_ids([0], 0, 0)
