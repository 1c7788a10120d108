"""Schedules, clipping, which parameters decay, and the update of slices against the paper's formula on whole tensors."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpshard.autograd.tensor import Parameter
from mpshard.device import Kind, open_device
from mpshard.device.lasting import Lasting
from mpshard.optim import AdamW, clip_factor, decays, learning_rate
from mpshard.optim.moments import BF16
from mpshard.optim.muon import cost
from mpshard.optim.owners import owners, routes
from mpshard.shard.layout import lay_out
from mpshard.shard.options import Options


# -- schedules -------------------------------------------------------------------------------
def rates(schedule: str, floor: float = 0.0, warmup: int = 4, steps: int = 12) -> list[float]:
    return [learning_rate(s, peak=2.0, steps=steps, warmup=warmup, schedule=schedule, floor=floor) for s in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_is_a_line_to_the_peak(schedule):
    assert rates(schedule)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates(schedule, warmup=0)[0] == 2.0


def test_shapes_after_warm_up():
    assert rates("constant")[4:] == [2.0] * 8
    assert rates("linear")[4:] == pytest.approx([2 * (1 - k / 8) for k in range(8)])
    assert rates("cosine")[4:] == pytest.approx([1 + math.cos(math.pi * k / 8) for k in range(8)])
    assert rates("linear", floor=0.5)[8] == pytest.approx(1.5)  # half way between the peak and half the peak


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_floor_is_where_it_ends(schedule):
    for step in (12, 13, 1000):
        assert learning_rate(step, peak=2.0, steps=12, warmup=4, schedule=schedule, floor=0.1) == pytest.approx(0.2)


def test_degenerate_lengths():
    assert learning_rate(0, peak=1.0, steps=1, warmup=1) == 1.0
    assert learning_rate(1, peak=1.0, steps=1, warmup=1, floor=0.5) == 1.0  # all warm-up: nothing left to decay over
    assert learning_rate(0, peak=1.0, steps=1, warmup=0) == 1.0


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule='step' is not known; use one of cosine, linear, constant"):
        learning_rate(0, peak=1.0, steps=2, warmup=0, schedule="step")


# -- clipping --------------------------------------------------------------------------------
def test_clipping():
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(4.0, 0.0) == 1.0  # 0: no clipping
    assert clip_factor(0.0, 1.0) == 1.0


# -- which parameters decay ------------------------------------------------------------------
@pytest.mark.parametrize(("name", "shape", "patterns", "expected"), [
    ("h.0.attn.c_attn.weight", (4, 12), None, True),
    ("h.0.ln_1.weight", (4,), None, False),
    ("scale", (), None, False),
    ("h.0.attn.c_attn.weight", (4, 12), ["*.bias", "*ln_*"], True),
    ("h.0.attn.c_attn.bias", (12,), ["*.bias", "*ln_*"], False),
    ("h.0.ln_1.weight", (4,), ["*.bias", "*ln_*"], False),
    ("h.0.ln_1.weight", (4,), ["*.bias"], True),  # patterns replace the rule, they do not add to it
    ("wte.weight", (7, 4), ["WTE*"], True),  # case counts
])
def test_decay_is_decided_by_shape_or_by_name(name, shape, patterns, expected):
    assert decays(Parameter(name, shape), patterns) is expected


# -- the update ------------------------------------------------------------------------------
SHAPES = [("norm", (26,)), ("scalar", ()), ("empty", (0, 3)), ("table", (101, 26)), ("bias", (5,)), ("out", (3, 7))]


def adamw_by_formula(weights: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]], decayed: set[str], *, lr: float,
                     beta1: float, beta2: float, eps: float, decay: float, scales: list[float]) -> dict[str, np.ndarray]:
    """Loshchilov, Hutter 2017 (arXiv:1711.05101), algorithm 2, in float64 on whole tensors."""
    out = {}
    for name, w in weights.items():
        w, m, v = w.astype(np.float64), 0.0, 0.0
        for t, (gradient, scale) in enumerate(zip(gradients, scales, strict=True), 1):
            g = gradient[name] * scale
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w = w - lr * decay * w * (name in decayed) - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        out[name] = w
    return out


def rank_of(rank: int, world: int, weights: dict[str, np.ndarray], device: Any) -> Any:
    """What AdamW uses of a Sharded, for one rank, without the rest."""
    layout = lay_out(SHAPES, world, align=4)
    segments = layout.segments(rank)

    def slices(values: dict[str, np.ndarray]) -> np.ndarray:
        out = np.zeros(layout.shard_size, np.float32)
        for s in segments:
            out[s.slice] = values[s.name].ravel()[s.start:s.stop]
        return out

    master = Lasting.of(device, slices(weights))
    unit = SimpleNamespace(name="only", master=master, shard=master.array, gradient=np.zeros(layout.shard_size, np.float32),
                           dtype=np.dtype("f4"), segments=segments, learns=True, publish=lambda: None)
    parameters = [Parameter(name, shape) for name, shape in SHAPES]
    return SimpleNamespace(device=device, units={"only": unit}, model=SimpleNamespace(parameters=parameters), slices=slices,
                           loss_scale=None, seed=0, options=Options())


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("no_decay", [None, ["table", "b*"]])
def test_slices_updated_apart_are_the_whole_update(world, no_decay):
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES}
    gradients = [{name: np.float32(10) * random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES} for _ in range(3)]
    tokens = [40, 50, 60]
    norms = [math.sqrt(sum((v.astype(np.float64) ** 2).sum() for v in g.values())) / n for g, n in zip(gradients, tokens, strict=True)]
    limit = sorted(norms)[1]  # clips some steps and not others
    decayed = {"table", "out"} if no_decay is None else {"norm", "scalar", "empty", "out"}
    expected = adamw_by_formula(weights, gradients, decayed, lr=0.1, beta1=0.8, beta2=0.9, eps=1e-8, decay=0.3,
                                scales=[clip_factor(norm, limit) / n for norm, n in zip(norms, tokens, strict=True)])
    seen = {name: np.zeros(shape, int).ravel() for name, shape in SHAPES}
    for rank in range(world):
        sharded = rank_of(rank, world, weights, open_device("numpy", poison=True))
        optim = AdamW(sharded, lr=0.1, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3, clip_grad_norm=limit, no_decay=no_decay)
        unit = sharded.units["only"]
        for gradient, n, norm in zip(gradients, tokens, norms, strict=True):
            unit.gradient[:] = sharded.slices(gradient)
            assert optim.step(SimpleNamespace(grad_norm=norm, tokens=n, loss_scale=1.0, is_finite=True)) == clip_factor(norm, limit)
        for s in unit.segments:
            np.testing.assert_allclose(unit.shard[s.slice], expected[s.name].ravel()[s.start:s.stop], rtol=2e-5, atol=2e-6)
            seen[s.name][s.start:s.stop] += 1
        assert sharded.device.memory.current(Kind.MOMENT) == 2 * 4 * sum(s.size for s in unit.segments)
    assert all((count == 1).all() for count in seen.values())


def test_neighbours_that_are_treated_alike_are_one_update():
    optim = AdamW(rank_of(0, 1, {name: np.zeros(shape, np.float32) for name, shape in SHAPES}, open_device("numpy")))
    runs = [(slice(0, 27), False), (slice(27, 2653), True), (slice(2653, 2658), False), (slice(2658, 2679), True)]
    assert optim.moments["only"].runs == [(where, where, decay) for where, decay in runs]


def test_a_changed_rate_takes_effect_at_the_next_step():
    weights = {name: np.ones(shape, np.float32) for name, shape in SHAPES}
    sharded = rank_of(0, 1, weights, open_device("numpy"))
    optim = AdamW(sharded, lr=0.0, weight_decay=0.0)
    unit = sharded.units["only"]
    unit.gradient[:] = 1
    optim.step(SimpleNamespace(grad_norm=1.0, tokens=1, loss_scale=1.0, is_finite=True))
    assert (unit.shard[unit.segments[0].slice] == 1).all()
    optim.lr = 0.5
    optim.step(SimpleNamespace(grad_norm=1.0, tokens=1, loss_scale=1.0, is_finite=True))
    np.testing.assert_allclose(unit.shard[unit.segments[0].slice], 0.5, rtol=1e-5)  # a constant gradient: steps of lr


# -- 16-bit moments --------------------------------------------------------------------------
def test_rounding_at_random_is_right_on_average_and_exact_where_it_can_be():
    device, n = open_device("numpy"), 1 << 16
    value = np.float32(1 + 1 / 128 * 0.3)  # bfloat16 has 1 and 1 + 1/128 about it
    out = np.empty(n, BF16)
    device.round_at_random(np.full(n, value), out, (1, 2), 0)
    found = out.astype(np.float64)
    assert set(found) == {1.0, 1 + 1 / 128}
    assert found.mean() == pytest.approx(float(value), abs=5 / 128 / 2 / math.sqrt(n))  # five standard deviations
    exact = np.array([0.0, -1.5, 2.0**-120, np.inf, -np.inf], np.float32)
    short = np.empty(5, BF16)
    device.round_at_random(exact.copy(), short, (3, 4), 7)
    np.testing.assert_array_equal(short.astype(np.float32), exact)


def test_rounding_is_a_function_of_the_element():
    device, values = open_device("numpy"), np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    whole, parts = np.empty(1000, BF16), np.empty(1000, BF16)
    device.round_at_random(values.copy(), whole, (5, 6), 0)
    for start, stop in ((0, 300), (300, 301), (301, 1000)):
        device.round_at_random(values[start:stop].copy(), parts[start:stop], (5, 6), start)
    np.testing.assert_array_equal(whole.view(np.uint16), parts.view(np.uint16))


# -- owners ----------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_matrices_are_dealt_out_evenly(ranks):
    costs = {f"{block}.{name}": cost(shape) for block in range(12)
             for name, shape in (("qkv", (1536, 512)), ("out", (512, 512)), ("up", (2048, 512)), ("down", (512, 2048)))}
    chosen = owners(costs, ranks)
    load = [sum(costs[name] for name, owner in chosen.items() if owner == rank) for rank in range(ranks)]
    assert chosen.keys() == costs.keys() and max(load) <= 1.1 * sum(load) / ranks
    assert chosen == owners(dict(reversed(costs.items())), ranks)  # whatever the order


def test_routes_cover_every_element_once():
    layouts = {"a": lay_out([("x", (5, 7)), ("n", (3,)), ("y", (11, 2))], 3, align=4), "b": lay_out([("z", (2, 2))], 3, align=4)}
    for route in routes(layouts, {"x": 0, "y": 2, "z": 1}, 3):
        pieces = [piece for piece in route.pieces if piece[0] < piece[1]]
        assert [a for a, _ in pieces[1:]] == [b for _, b in pieces[:-1]] and pieces[0][0] == 0
        assert pieces[-1][1] == {"x": 35, "y": 22, "z": 4}[route.name]
