"""One gradient check serves every operation: backward against finite differences in float64.

For an operation with output y, any R of y's shape and any direction v of its inputs, the derivative of sum(R * y)
along v is <gradient, v>. So two evaluations check all elements of all gradients at once (the idea of HIPS/autograd's
check_grads). The central difference's own error is about 1e-10 here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpshard.autograd import Parameter, Tape, Tensor, ops
from mpshard.autograd.ops import Loss
from mpshard.device import open_device
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import MicroBatch

B, T, D, V = 2, 5, 6, 7
STEP = 1e-6
IDS = np.random.default_rng(1).integers(0, V, (B, T))
TARGETS = np.where(IDS == 3, -100, (IDS + 1) % V)  # some positions have nothing to learn
SEGMENTS = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]], np.int32)  # packed documents
POSITIONS = np.array([[0, 1, 0, 1, 2], [0, 0, 1, 0, 1]])  # theirs, from 0 in each


def angles(width: int) -> tuple[np.ndarray, np.ndarray]:
    turns = np.outer(np.arange(T), 10.0 ** -np.arange(width // 2))
    return np.cos(turns), np.sin(turns)


class Case(NamedTuple):
    """An operation on an input x of shape `x` (None: it has none) with parameters of the given shapes; a list of
    shapes is a fused parameter over that many neighbours."""

    run: Callable[..., Tensor]
    x: tuple[int, ...] | None = (B, T, D)
    parameters: Mapping[str, tuple[int, ...] | list[tuple[int, ...]]] = {}
    passes_dy_on: bool = False  # its rule hands dy itself to an input, which may then add to it


def tied(tape: Tape, x: None, table: Parameter) -> Loss:
    return ops.cross_entropy(tape, ops.embedding(tape, IDS, table), table, TARGETS)


def used_three_times(tape: Tape, x: Tensor, w: Parameter, n: Parameter) -> Tensor:
    h = ops.rms_norm(tape, x, n, 1e-5)
    x = ops.residual(tape, x, ops.linear(tape, h, w))
    return ops.residual(tape, x, ops.gelu(tape, ops.linear(tape, ops.rms_norm(tape, x, n, 1e-5), w)), 0.25)


QKV = (B, T, (4 + 2 * 2) * 4)  # 4 query heads and 2 key/value heads of width 4
CASES = {
    "linear": Case(ops.linear, parameters={"w": (4, D)}),
    "linear, bias": Case(ops.linear, parameters={"w": (4, D), "b": (4,)}),
    "linear, fused": Case(ops.linear, parameters={"w": [(4, D), (2, D), (1, D)], "b": [(4,), (2,), (1,)]}),
    "linear, transposed": Case(lambda t, x, w, b: ops.linear(t, x, w, b, transposed=True), parameters={"w": (D, 4), "b": (4,)}),
    "embedding": Case(lambda t, x, w: ops.embedding(t, IDS, w), None, {"w": (V, D)}),
    "embedding, own positions": Case(lambda t, x, w, p: ops.embedding(t, IDS, w, p, POSITIONS), None, {"w": (V, D), "p": (T, D)}),
    "embedding, positions": Case(lambda t, x, w, p: ops.embedding(t, IDS, w, p), None, {"w": (V, D), "p": (T + 3, D)}),
    "layer_norm": Case(lambda t, x, w, b: ops.layer_norm(t, x, w, b, 1e-5), parameters={"w": (D,), "b": (D,)}),
    "rms_norm": Case(lambda t, x, w: ops.rms_norm(t, x, w, 1e-5), parameters={"w": (D,)}),
    "head_norm": Case(lambda t, x, q, k: ops.head_norm(t, x, q, k, 4, 2, 1e-5), QKV, {"q": (4,), "k": (4,)}),
    "head_norm, attention": Case(lambda t, x, q, k: ops.attention(t, ops.head_norm(t, x, q, k, 4, 2, 1e-5), 4, 2, 0.5, angles(4)),
                                 QKV, {"q": (4,), "k": (4,)}),
    "gelu, tanh": Case(ops.gelu),
    "gelu, exact": Case(lambda t, x: ops.gelu(t, x, approximate=False)),
    "swiglu": Case(ops.swiglu),
    "attention": Case(lambda t, x: ops.attention(t, x, 4, 4, 0.7), (B, T, 3 * 4 * 4)),
    "attention, grouped, rotary": Case(lambda t, x: ops.attention(t, x, 4, 2, 0.5, angles(4)), QKV),
    "attention, one key head": Case(lambda t, x: ops.attention(t, x, 4, 1, 0.5, angles(4)), (B, T, (4 + 2) * 4)),
    "attention, documents": Case(lambda t, x: ops.attention(t, x, 4, 2, 0.5, angles(4), SEGMENTS), QKV),
    "attention, positions": Case(
        lambda t, x: ops.attention(t, x, 4, 2, 0.5, tuple(a[POSITIONS] for a in angles(4)), SEGMENTS), QKV),
    "dropout": Case(lambda t, x: ops.dropout(t, x, 0.3)),
    "dropout, none": Case(lambda t, x: ops.dropout(t, x, 0.0), passes_dy_on=True),
    "residual": Case(lambda t, x, w: ops.residual(t, x, ops.linear(t, x, w)), parameters={"w": (D, D)}, passes_dy_on=True),
    "residual, dropout": Case(lambda t, x, w: ops.residual(t, x, ops.linear(t, x, w), 0.4), parameters={"w": (D, D)}, passes_dy_on=True),
    "cross_entropy": Case(lambda t, x, w: ops.cross_entropy(t, x, w, TARGETS), parameters={"w": (V, D)}),
    "tied embedding and output": Case(tied, None, {"w": (V, D)}),
    "weights used several times": Case(used_three_times, parameters={"w": (D, D), "n": (D,)}, passes_dy_on=True),
}


class Bench:
    """Parameters with storage of their own, and a way to run a function of them forwards and backwards."""

    def __init__(self, run: Callable[[Tape, Tensor | None], Tensor], x: np.ndarray | None, parameters: Sequence[Parameter],
                 fused: Sequence[Parameter] = (), seed: int = 0) -> None:
        self.device, self.run, self.x = open_device("numpy", poison=True), run, x
        self.random = np.random.default_rng(seed)
        size = sum(p.size for p in parameters)
        self.weights, self.gradient = self.random.standard_normal(size), np.full(size, np.nan)
        starts = dict(zip((p.name for p in parameters), np.cumsum([0, *(p.size for p in parameters)]), strict=False))
        for p in [*parameters, *fused]:
            place = slice(starts[(p.parts or (p,))[0].name], None)
            p.bind(self.weights[place][:p.size].reshape(p.shape))
            p.bind_grad(self.gradient[place][:p.size].reshape(p.shape))
        self.parameters, self.fused = list(parameters), list(fused)

    def forward(self) -> tuple[Tape, Tensor | None, Tensor]:
        tape = Tape(self.device, key=("seed", 0, 0))
        x = None if self.x is None else Tensor(self.x.copy())  # some operations write over their input
        return tape, x, self.run(tape, x)

    def value(self, weight: np.ndarray | float) -> float:
        """sum(weight * output); of a loss its value."""
        tape, _, y = self.forward()
        if isinstance(y, Loss):
            self.unbound(lambda: tape.backward(y, 1.0))
            return y.value
        return float((weight * y.data).sum())

    def unbound(self, action: Callable[[], Any]) -> None:
        """Run without any gradient being wanted."""
        kept = [(p, p.grad, p.grad_started) for p in self.parameters + self.fused]
        for p, _, _ in kept:
            p.grad = None
        action()
        for p, grad, started in kept:
            p.grad, p.grad_started = grad, started

    def check(self, read_only_dy: bool) -> None:
        tape, x, y = self.forward()
        dy: Any = 1.0 if isinstance(y, Loss) else self.random.standard_normal(y.data.shape)
        given = dy if isinstance(y, Loss) else dy.copy()
        if read_only_dy and not isinstance(y, Loss):
            given.flags.writeable = False
        tape.backward(y, given)
        assert not tape.entries
        for p in self.parameters:
            assert p.grad_started, f"{p.name} was not reached"
        assert np.isfinite(self.gradient).all(), "the first writer must overwrite every element"
        leaves = [(self.weights, self.gradient)] + ([] if x is None else [(self.x, x.grad)])
        for values, gradient in leaves:  # each leaf by itself: an error says where it is
            direction = self.random.standard_normal(values.shape)
            start = values.copy()
            ends = []
            for sign in (1, -1):
                values[...] = start + sign * STEP * direction
                ends.append(self.value(dy))
            values[...] = start
            numerical = (ends[0] - ends[1]) / (2 * STEP)
            np.testing.assert_allclose((gradient * direction).sum(), numerical, rtol=2e-7, atol=1e-8)


def bench(case: Case) -> Bench:
    parameters: list[Parameter] = []
    arguments: list[Parameter] = []
    fused = []
    for name, shape in case.parameters.items():
        if isinstance(shape, list):
            parts = [Parameter(f"{name}{i}", part) for i, part in enumerate(shape)]
            parameters += parts
            arguments.append(Parameter.fuse(name, parts))
            fused.append(arguments[-1])
        else:
            arguments.append(Parameter(name, shape))
            parameters.append(arguments[-1])
    x = None if case.x is None else np.random.default_rng(2).standard_normal(case.x)
    return Bench(lambda tape, x: case.run(tape, x, *arguments), x, parameters, fused)


@pytest.mark.parametrize("name", CASES)
def test_gradient(name):
    bench(CASES[name]).check(read_only_dy=not CASES[name].passes_dy_on)


@pytest.mark.parametrize("model", [
    gpt2(GPT2Config(V, T + 1, n_layers=2, d_model=8, n_heads=2, dropout=0.2)),
    gpt2(GPT2Config(V, T, n_layers=1, d_model=8, n_heads=4, tie_embeddings=False, gelu_approximate=False)),
    llama(LlamaConfig(V, T, n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, d_ff=6, attention_bias=True, mlp_bias=True)),
    llama(LlamaConfig(V, T, n_layers=1, d_model=16, n_heads=4, n_kv_heads=1, d_ff=5, tie_embeddings=True, dropout=0.2)),
    llama(LlamaConfig(V, T, n_layers=1, d_model=12, n_heads=2, d_ff=5, arch="qwen2")),
    llama(LlamaConfig(V, T, n_layers=1, d_model=10, n_heads=4, n_kv_heads=2, d_ff=5, arch="qwen3", head_dim=6)),
], ids=["gpt2", "gpt2, untied", "llama", "llama, tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["", "own positions"])
def test_gradient_of_whole_models(model, positions):
    batch = MicroBatch(IDS, TARGETS, SEGMENTS, positions)

    def run(tape: Tape, x: None) -> Tensor:
        for module in model.modules:
            x = module.forward(tape, x, batch)
        return x

    Bench(run, None, model.parameters, [p for module in model.modules for p in module.fused]).check(read_only_dy=False)


# -- what a gradient check cannot see ---------------------------------------------------------
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.parameters])
def test_a_second_backward_adds(name):
    """Accumulation over uses: the first write overwrites, all later ones add."""
    case = bench(CASES[name])
    gradients = []
    for _ in range(2):
        tape, _, y = case.forward()
        tape.backward(y, 1.0 if isinstance(y, Loss) else np.ones_like(y.data))
        gradients.append(case.gradient.copy())
    np.testing.assert_allclose(gradients[1], 2 * gradients[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.parameters and case.x])
def test_the_inputs_gradient_is_the_same_if_no_weight_wants_one(name):
    case = bench(CASES[name])

    def input_gradient() -> np.ndarray:
        tape, x, y = case.forward()
        tape.backward(y, 1.0 if isinstance(y, Loss) else np.ones_like(y.data))
        return x.grad

    wanted = input_gradient()
    for p in case.parameters + case.fused:
        p.bind_grad(None)
    np.testing.assert_allclose(input_gradient(), wanted, rtol=1e-12)


def test_the_loss_in_evaluation_is_the_loss_in_training():
    case = bench(CASES["cross_entropy"])
    silent = Tape(case.device, recording=False, training=False)
    evaluated = case.run(silent, Tensor(case.x.copy()))
    assert not silent.entries
    assert evaluated.value == pytest.approx(case.value(1.0), rel=1e-12)
    logits = case.x.reshape(-1, D) @ case.weights.reshape(V, D).T
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    valid = TARGETS.ravel() != -100
    assert evaluated.value == pytest.approx(-log_p[valid, TARGETS.ravel()[valid]].sum(), rel=1e-12)


def test_dropout_depends_on_its_key_and_on_nothing_else():
    device, x = open_device("numpy", poison=True), Tensor(np.ones((40, 50)))

    def masks(*key: object) -> list[bytes]:
        tape = Tape(device, key=key)
        return [(ops.dropout(tape, x, 0.5).data == 0).tobytes() for _ in range(2)]

    first = masks(0, 5, 1, "embed")
    assert first == masks(0, 5, 1, "embed")
    others = [masks(1, 5, 1, "embed"), masks(0, 6, 1, "embed"), masks(0, 5, 2, "embed"), masks(0, 5, 1, "head")]
    assert len({*first, *(mask for pair in others for mask in pair)}) == 10  # each operation of each tape its own
    assert ops.dropout(Tape(device, training=False), x, 0.5) is x
    dropped = ops.dropout(Tape(device), x, 0.25).data
    assert set(np.unique(dropped)) == {0.0, 1 / 0.75}
    assert abs((dropped == 0).mean() - 0.25) < 0.05  # 5 standard deviations


def test_a_weight_read_while_its_unit_is_not_gathered_is_named():
    w = Parameter("layers.3.weight", (4, D))
    with pytest.raises(RuntimeError, match=r"layers\.3\.weight was read while its unit is not gathered"):
        ops.linear(Tape(open_device("numpy")), Tensor(np.ones((1, D))), w)
