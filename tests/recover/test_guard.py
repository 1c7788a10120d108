"""The guard's verdicts, from losses and norms alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpshard.config import ConfigError, GuardConfig, load, validate
from mpshard.recover.guard import Guard

NAN, INF = math.nan, math.inf


def judged(guard: Guard, losses: list[float], norm: float = 1.0) -> list[str]:
    """The action for each loss, "" for a good step."""
    verdicts = [guard.judge(loss, norm) for loss in losses]
    return ["" if verdict is None else verdict.action for verdict in verdicts]


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (2.0, NAN), (2.0, INF), (NAN, NAN)])
def test_what_is_not_finite_falls_under_the_policy(policy, loss, norm):
    guard = Guard(GuardConfig(nan=policy))
    assert guard.judge(2.0, 1.0) is None
    assert guard.judge(loss, norm).action == policy


def test_an_overflow_that_loss_scaling_answers_is_not_the_guards():
    guard = Guard(GuardConfig(nan="stop", spike=5.0))
    assert guard.judge(2.0, INF, scaled=True) is None
    assert guard.judge(NAN, INF, scaled=True).action == "stop"


def test_a_spike_is_measured_in_robust_deviations():
    """1.4826 times the median absolute deviation estimates a normal distribution's standard deviation, whatever a few
    outliers are (Rousseeuw, Croux 1993, J. Am. Stat. Assoc. 88, 1273)."""
    noise = np.random.default_rng(0).normal(3.0, 0.1, 100)
    noise[::20] = 50.0  # outliers: a mean and a standard deviation would let anything pass
    guard = Guard(GuardConfig(window=100))
    guard.remember({"loss": float(value), "grad_norm": 1.0} for value in noise)
    guard.settings = GuardConfig(spike=6.0, window=100)
    assert judged(guard, [3.4, 2.0, 0.1]) == ["", "", ""]  # 4 deviations up, and any number down
    verdict = guard.judge(3.9, 1.0)
    assert verdict.action == "skip" and "loss is 3.9" in verdict.why and "robust deviations over the median 3" in verdict.why
    assert guard.judge(3.0, 9.0).why.startswith("the gradient norm is 9")


def test_no_spike_before_there_is_something_to_compare_with():
    guard = Guard(GuardConfig(spike=3.0, window=100))
    assert judged(guard, [1.0] * 15 + [100.0]) == [""] * 16
    guard = Guard(GuardConfig(spike=3.0, window=8))
    assert judged(guard, [1.0] * 8 + [100.0]) == [""] * 8 + ["skip"]


def test_a_level_loss_tolerates_a_thousandth():
    guard = Guard(GuardConfig(spike=3.0, window=8))
    assert judged(guard, [1.0] * 8 + [1.002, 1.1]) == [""] * 9 + ["skip"]


def test_tries_are_bounded_and_good_steps_clear_them():
    guard = Guard(GuardConfig(nan="skip", tries=2, window=8))
    assert judged(guard, [NAN, NAN, NAN]) == ["skip", "skip", "stop"]
    guard = Guard(GuardConfig(nan="skip", tries=2, window=8))
    assert judged(guard, [NAN, NAN] + [1.0] * 8 + [NAN, NAN, NAN]) == ["skip", "skip"] + [""] * 8 + ["skip", "skip", "stop"]
    assert "2 interventions" in guard.judge(NAN, NAN).why


def test_a_resumed_guard_judges_as_the_first_would_have():
    settings = GuardConfig(nan="skip", spike=4.0, window=16, tries=3)
    losses = [*np.random.default_rng(1).normal(2.0, 0.05, 40).tolist(), NAN, 2.0, 2.01, 9.0, 2.0, NAN, NAN]
    whole, first = Guard(settings), Guard(settings)
    expected = judged(whole, losses)
    lines = []
    for step, loss in enumerate(losses[:43], 1):
        verdict = first.judge(loss, 1.0)
        lines.append({"step": step, "loss": loss, "grad_norm": 1.0} if verdict is None else {"step": step, "event": verdict.action})
    resumed = Guard(settings)
    resumed.remember([*lines, {"step": 43, "eval_loss": 2.0}, {"step": 43, "event": "preempted"}])
    assert judged(resumed, losses[43:]) == expected[43:]
    assert "skip" in expected[43:] and expected[-1] == "stop"


@pytest.mark.parametrize(("settings", "words"), [
    (["guard.nan=rollback"], "guard.nan=rollback needs checkpoints to go back to: set checkpoint.every"),
    (["guard.on_spike=stop"], "guard.on_spike=stop has no effect with guard.spike=0"),
    (["guard.spike=-1"], "must be at least 0"),
    (["guard.window=2"], "must be at least 8"),
])
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(ConfigError, match=words):
        validate(load(None, settings), 1)
