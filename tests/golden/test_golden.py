"""The golden files agree with themselves; nothing of mpshard is used here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.golden import NAMES, Golden, load


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load(request.param)


def test_files_stay_small() -> None:
    for name in NAMES:
        assert Path(__file__).with_name(f"{name}.npz").stat().st_size < 2**20


def test_every_parameter_has_its_gradient_and_its_end(golden: Golden) -> None:
    for values in (golden.gradients, golden.gradients64, golden.finals, golden.finals64):
        assert {k: v.shape for k, v in values.items()} == {k: v.shape for k, v in golden.weights.items()}
    assert all(value.dtype == np.float32 for value in golden.weights.values())


def test_first_norm_is_that_of_the_gradients(golden: Golden) -> None:
    """So a tied parameter is there once, with the gradients of both its uses."""
    norm = np.sqrt(sum(np.sum(g**2) for g in golden.gradients64.values()))
    np.testing.assert_allclose(golden.grad_norms64[0], norm, rtol=1e-12)


def test_rounding_is_as_small_as_the_note_says(golden: Golden) -> None:
    np.testing.assert_allclose(golden.losses, golden.losses64, rtol=1e-6)
    np.testing.assert_allclose(golden.logits, golden.logits64, atol=1e-5)
    for name, reference in golden.gradients64.items():
        assert np.abs(golden.gradients[name] - reference).max() <= 2e-6 * np.abs(reference).max(), name
    for name, reference in golden.finals64.items():
        if not name.endswith("c_attn.bias"):
            assert np.abs(golden.finals[name] - reference).max() <= 1e-4 * np.abs(reference).max(), name


def test_batches_are_uneven(golden: Golden) -> None:
    valid = (golden.targets != -100).sum(-1)  # (steps, sequences)
    assert valid[0].min() == 0
    assert len(np.unique(valid.sum(-1))) > 10
    assert golden.losses[-1] < golden.losses[0]
