"""Initial values are a function of (seed, name, element), however a parameter is cut, and have the moments asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard.nn.init import BLOCK, Constant, Normal, fill

SIZE = 2 * BLOCK + 1000
WHOLE = fill(Normal(0.02), 3, "layers.0.weight", 0, SIZE)


@given(st.lists(st.one_of(st.integers(0, SIZE), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])), max_size=6))
def test_pieces_are_pieces_of_the_whole(cuts):
    edges = [0, *sorted(cuts), SIZE]
    pieces = [fill(Normal(0.02), 3, "layers.0.weight", a, b) for a, b in zip(edges, edges[1:], strict=False)]
    np.testing.assert_array_equal(np.concatenate(pieces), WHOLE)


def test_moments_of_the_normal():
    n = len(WHOLE)
    assert WHOLE.dtype == np.float32
    z = WHOLE.astype(np.float64) / 0.02
    assert abs(z.mean()) < 5 / np.sqrt(n)  # each bound: 5 standard errors
    assert abs((z**2).mean() - 1) < 5 * np.sqrt(2 / n)
    assert abs((z**4).mean() - 3) < 5 * np.sqrt(96 / n)
    assert abs((z[1:] * z[:-1]).mean()) < 5 / np.sqrt(n)


@pytest.mark.parametrize("other", [(4, "layers.0.weight", 0), (3, "layers.1.weight", 0), (3, "layers.0.weight", BLOCK)],
                         ids=["seed", "name", "block"])
def test_other_seeds_names_and_blocks_are_independent(other):
    seed, name, start = other
    a, b = WHOLE[:BLOCK].astype(np.float64), fill(Normal(0.02), seed, name, start, start + BLOCK).astype(np.float64)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(BLOCK)


def test_constant_and_empty():
    np.testing.assert_array_equal(fill(Constant(1.0), 0, "norm", 5, 9), np.ones(4, np.float32))
    assert fill(Normal(1.0), 0, "w", 7, 7).size == fill(Constant(1.0), 0, "w", 7, 7).size == 0


def test_values_stay_what_they_are():
    """A new NumPy, or a change here, must not silently change everybody's starting point."""
    np.testing.assert_allclose(fill(Normal(1.0), 0, "a", 0, 3), [0.99064636, 0.5355903, -1.6022365], rtol=1e-6)
