"""Every operation beside its gradient rule.

An operation takes the tape first, then tensors and parameters, and returns a tensor. Its rule takes
the tape, the gradient dy of the operation's result, and what the operation saved. Rules never write
into dy: a residual connection hands the same array to both of its inputs.

Shapes: b sequences of t positions, width d; linear operations treat (b, t) as one axis of n rows.
"""

from __future__ import annotations

from typing import Any

from mpshard.autograd.epilogues import past_gelu, weight_and_bias, with_gelu
from mpshard.autograd.tensor import Activated, Adapter, Array, Parameter, Tape, Tensor


def rows(x: Array) -> Array:
    """(..., d) seen as (n, d)."""
    return x.reshape(-1, x.shape[-1])


# -- parameters ------------------------------------------------------------------------------
def whole(tape: Tape, weight: Parameter) -> Array:
    """The weight; of a fused one whose parts lie in different units a copy, so that there is one product all the same."""
    if not weight.apart:
        return weight.data
    joined = tape.device.empty(weight.shape, weight.parts[0].data.dtype)
    for part, place in _parts(weight):
        joined[place] = part.data
    return joined


def _parts(weight: Parameter) -> list[tuple[Parameter, slice]]:
    """What is stored in one piece, and its rows of the weight."""
    if not weight.apart:
        return [(weight, slice(None))]
    found, row = [], 0
    for part in weight.parts:
        found.append((part, slice(row, row + part.shape[0])))
        row += part.shape[0]
    return found


# -- linear ----------------------------------------------------------------------------------
def product(tape: Tape, a: Array, b: Array, gradients: tuple[bool, bool] = (False, False), **options: Any) -> Array:
    """(m, k) @ (k, n) of a linear layer, with the options of `Device.matmul`; with `Tape.fp8` of inputs rounded to 8 bits.

    gradients: whether a is one, whether b is one.
    """
    if tape.fp8:
        return tape.device.matmul_fp8(a, b, gradients, **options)
    return tape.device.matmul(a, b, **options)


def linear(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter | None = None, transposed: bool = False) -> Tensor:
    """x (..., i) -> (..., o): x @ weight.T + bias, weight (o, i) as torch.nn.Linear stores it.

    transposed: the weight is stored (i, o), as GPT-2's Conv1D does. BLAS reads either way round.
    """
    w = whole(tape, weight)
    y = product(tape, rows(x.data), w if transposed else w.T, bias=None if bias is None else whole(tape, bias))
    out = tape.record(y.reshape(*x.data.shape[:-1], y.shape[-1]), linear_backward, x, weight, bias, transposed)
    adapters = _adapters(weight)
    return low_rank(tape, x, out, adapters) if adapters else out


def linear_backward(tape: Tape, dy: Array, x: Tensor, weight: Parameter, bias: Parameter | None, transposed: bool) -> None:
    dy, inputs = rows(dy), rows(x.data) if weight.learns else None
    tape.for_weights(lambda: _linear_weights(tape, dy, inputs, weight, bias, transposed))
    if x.wants_grad:
        w = whole(tape, weight)
        w = w.T if transposed else w
        if tape.device.epilogues is None or not past_gelu(tape, dy, w, x):
            x.accumulate(product(tape, dy, w, (True, False)).reshape(x.data.shape), tape.device)


def _linear_weights(tape: Tape, dy: Array, x: Array, weight: Parameter, bias: Parameter | None, transposed: bool) -> None:
    """Gradients of a weight and a bias; dy (n, o), x (n, i), which is not read if the weight does not learn."""
    if tape.device.epilogues is not None and weight_and_bias(tape, dy, x, weight, bias, transposed):
        return
    for part, place in _parts(bias) if bias is not None else ():
        target, accumulate = part.grad_target()
        if target is not None:
            tape.device.column_sum(_columns(tape, dy, place), target, accumulate)
    for part, place in _parts(weight):
        target, accumulate = part.grad_target()
        if target is not None:
            dy_part = _columns(tape, dy, place)
            a, b = (x, dy_part) if transposed else (dy_part, x)
            product(tape, a.T, b, (not transposed, transposed), out=target, accumulate=accumulate)


def _adapters(weight: Parameter) -> list[tuple[slice, Adapter]]:
    """The adapters of a weight or of a fused one's parts, and which outputs each changes."""
    found, column = [], 0
    for part in weight.parts or (weight,):
        outputs = part.shape[1 if part.transposed else 0]
        if part.adapter is not None:
            found.append((slice(column, column + outputs), part.adapter))
        column += outputs
    return found


def low_rank(tape: Tape, x: Tensor, y: Tensor, adapters: list[tuple[slice, Adapter]]) -> Tensor:
    """y (..., o) + scale * (dropout(x) @ a.T) @ b.T in each adapter's columns, in place; x (..., i). See `Adapter`."""
    out, saved = rows(y.data), []
    for place, adapter in adapters:
        key = tape.random_key() if adapter.dropout and tape.training else None
        inner = tape.device.matmul(_dropped(tape, rows(x.data), adapter, key), adapter.a.data.T)  # (n, r)
        tape.device.blend(inner, inner, 0, adapter.scale)
        columns = _columns(tape, out, place)
        tape.device.matmul(inner, adapter.b.data.T, out=columns, accumulate=True)
        if columns is not out:
            out[:, place] = columns
        saved.append((place, adapter, key, inner))
    result = tape.record(y.data, low_rank_backward, x, y, saved)
    y.data = None  # the sum is in its place
    return result


def low_rank_backward(tape: Tape, dy: Array, x: Tensor, y: Tensor, saved: list[tuple[slice, Adapter, Any, Array]]) -> None:
    for place, adapter, key, inner in saved:
        dy_part = _columns(tape, rows(dy), place)
        target, accumulate = adapter.b.grad_target()
        if target is not None:
            tape.device.matmul(dy_part.T, inner, out=target, accumulate=accumulate)
        dinner = tape.device.matmul(dy_part, adapter.b.data)
        tape.device.blend(dinner, dinner, 0, adapter.scale)
        target, accumulate = adapter.a.grad_target()
        if target is not None:
            tape.device.matmul(dinner.T, _dropped(tape, rows(x.data), adapter, key), out=target, accumulate=accumulate)
        if x.wants_grad:
            dx = _dropped(tape, tape.device.matmul(dinner, adapter.a.data), adapter, key)
            x.accumulate(dx.reshape(x.data.shape), tape.device)
    y.accumulate(dy, tape.device)


def _dropped(tape: Tape, x: Array, adapter: Adapter, key: tuple[int, int] | None) -> Array:
    """x, or x with elements dropped; of a gradient the same elements as of the value."""
    return x if key is None else tape.device.dropout(x, adapter.dropout, key)


def _columns(tape: Tape, dy: Array, place: slice) -> Array:
    """dy (n, o) of some of the outputs; contiguous, a copy unless it is all of them."""
    if place in (slice(None), slice(0, dy.shape[1])):
        return dy
    part = tape.device.empty((len(dy), place.stop - place.start), dy.dtype)
    part[...] = dy[:, place]
    return part


# -- embedding -------------------------------------------------------------------------------
def embedding(tape: Tape, ids: Array, table: Parameter, positions: Parameter | None = None,
              position_ids: Array | None = None) -> Tensor:
    """ids (b, t) int64 -> (b, t, d): rows of `table` (v, d), plus learned positions (>= t, d) where there are any.

    position_ids (b, t): which of them; None: 0 ... t-1.
    """
    y = tape.device.embedding(ids, table.data)
    if positions is not None and position_ids is not None:
        tape.device.add(y, tape.device.embedding(position_ids, positions.data))
    elif positions is not None:
        tape.device.add_positions(y, positions.data)
    return tape.record(y, embedding_backward, ids, table, positions, position_ids)


def embedding_backward(tape: Tape, dy: Array, ids: Array, table: Parameter, positions: Parameter | None,
                       position_ids: Array | None) -> None:
    if positions is not None:
        target, accumulate = positions.grad_target()
        if target is not None and position_ids is not None:
            tape.device.embedding_backward(dy, position_ids, target, accumulate)
        elif target is not None:
            tape.device.positions_backward(dy, target, accumulate)
    target, accumulate = table.grad_target()
    if target is not None:
        tape.device.embedding_backward(dy, ids, target, accumulate)


# -- normalisation ---------------------------------------------------------------------------
def layer_norm(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter, eps: float) -> Tensor:
    """Normalise each row of x (..., d) to mean 0, variance 1, then scale and shift by weight, bias (d,)."""
    y, stats = tape.device.layer_norm(x.data, weight.data, bias.data, eps)
    out = Tensor(y, remake=lambda: tape.device.layer_norm(x.data, weight.data, bias.data, eps)[0])
    return tape.record(out, layer_norm_backward, x, weight, bias, stats)


def layer_norm_backward(tape: Tape, dy: Array, x: Tensor, weight: Parameter, bias: Parameter, stats: Array) -> None:
    (dweight, accumulate), (dbias, accumulate_bias) = weight.grad_target(), bias.grad_target()
    if dweight is None:
        accumulate = accumulate_bias
    x.grad = tape.device.layer_norm_backward(dy, x.data, weight.data, stats, dweight, dbias, accumulate, dx=x.grad)


def rms_norm(tape: Tape, x: Tensor, weight: Parameter, eps: float) -> Tensor:
    """Divide each row of x (..., d) by its root mean square, then scale by weight (d,)."""
    y, stats = tape.device.rms_norm(x.data, weight.data, eps)
    out = Tensor(y, remake=lambda: tape.device.rms_norm(x.data, weight.data, eps)[0])
    return tape.record(out, rms_norm_backward, x, weight, stats)


def rms_norm_backward(tape: Tape, dy: Array, x: Tensor, weight: Parameter, stats: Array) -> None:
    dweight, accumulate = weight.grad_target()
    x.grad = tape.device.rms_norm_backward(dy, x.data, weight.data, stats, dweight, accumulate, dx=x.grad)


def head_norm(tape: Tape, qkv: Tensor, query_weight: Parameter, key_weight: Parameter, heads: int, kv_heads: int,
              eps: float) -> Tensor:
    """RMS norm of every query head and every key head of qkv (b, t, (h + 2k) e), each over its own e elements, in place.

    query_weight, key_weight (e,). The heads as they were are kept for backward; the product that made qkv needs it not.
    Dehghani et al. 2023 (arXiv:2302.05442), section 2 (there with a layer norm); Qwen3.
    """
    saved = []
    for weight, part in zip((query_weight, key_weight), _query_and_key_heads(qkv.data, heads, kv_heads), strict=True):
        x = tape.device.empty(part.shape, part.dtype)
        x[...] = part
        y, stats = tape.device.rms_norm(x, weight.data, eps)
        part[...] = y
        saved.append((weight, Tensor(x, wants_grad=False), stats))
    return tape.record(qkv.data, head_norm_backward, qkv, saved, heads, kv_heads)


def head_norm_backward(tape: Tape, dy: Array, qkv: Tensor, saved: list[tuple[Parameter, Tensor, Array]], heads: int, kv_heads: int) -> None:
    dqkv = tape.device.empty(dy.shape, dy.dtype)
    dqkv[...] = dy  # of the values it is the gradient already
    for (weight, x, stats), part in zip(saved, _query_and_key_heads(dqkv, heads, kv_heads), strict=True):
        dx = tape.device.empty(part.shape, part.dtype)
        dx[...] = part
        dweight, accumulate = weight.grad_target()
        part[...] = tape.device.rms_norm_backward(dx, x.data, weight.data, stats, dweight, accumulate, dx=None)
    qkv.accumulate(dqkv, tape.device)


def _query_and_key_heads(qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array]:
    """Views (b, t, h, e) and (b, t, k, e)."""
    b, t, width = qkv.shape
    by_head = qkv.reshape(b, t, heads + 2 * kv_heads, width // (heads + 2 * kv_heads))
    return by_head[:, :, :heads], by_head[:, :, heads:heads + kv_heads]


# -- activations -----------------------------------------------------------------------------
def gelu(tape: Tape, x: Tensor, approximate: bool = True, made: Array | None = None) -> Tensor:
    """x * Phi(x), element by element; `approximate` is the tanh form that GPT-2 was trained with. made: by the product of x."""
    y = Activated(tape.device.gelu(x.data, approximate) if made is None else made, lambda: tape.device.gelu(x.data, approximate))
    y.of = x if approximate else None
    return tape.record(y, gelu_backward, x, y, approximate)  # y: backward has it anyway, for the next product's weight


def gelu_backward(tape: Tape, dy: Array, x: Tensor, y: Tensor, approximate: bool) -> None:
    x.accumulate(tape.device.gelu_backward(dy, x.data, approximate, y.data), tape.device)  # y saves an exponential


def linear_gelu(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter, transposed: bool = False, approximate: bool = True) -> Tensor:
    """gelu(linear(x, weight, bias)), by one product where the device has such a one and nothing comes between, as adapters do."""
    alone = tape.device.epilogues is None or tape.fp8 or not approximate or _adapters(weight)
    made = None if alone else with_gelu(tape, x.data, whole(tape, weight), whole(tape, bias), transposed)
    if made is None:
        return gelu(tape, linear(tape, x, weight, bias, transposed), approximate)
    return gelu(tape, tape.record(made[1], linear_backward, x, weight, bias, transposed), made=made[0])


def swiglu(tape: Tape, gate_up: Tensor) -> Tensor:
    """(..., 2f), gate and up side by side -> (..., f): silu(gate) * up."""
    def make() -> Array:
        return tape.device.swiglu(rows(gate_up.data)).reshape(*gate_up.data.shape[:-1], -1)

    y = Tensor(make(), remake=make)
    return tape.record(y, swiglu_backward, gate_up, y)  # y: as in gelu


def swiglu_backward(tape: Tape, dy: Array, gate_up: Tensor, y: Tensor) -> None:
    dx = tape.device.swiglu_backward(rows(dy), rows(gate_up.data), rows(y.data))
    gate_up.accumulate(dx.reshape(gate_up.data.shape), tape.device)


# -- attention -------------------------------------------------------------------------------
def attention(tape: Tape, qkv: Tensor, heads: int, kv_heads: int, scale: float,
              angles: tuple[Array, Array] | None = None, segments: Array | None = None,
              memory: tuple[Any, str] | None = None) -> Tensor:
    """Causal attention of qkv (b, t, (h + 2k) e) -> (b, t, h e), queries and keys turned by `angles` first.

    angles: cos, sin (t, e/2) or (b, t, e/2) for rotary embedding, None for models with learned positions. qkv is turned
    in place: the product that made it does not need it again, and attention's backward needs it turned.
    segments (b, t): which packed document each position belongs to.
    memory: a cache and the name of what it keeps for us: earlier positions are seen too, these are added. No gradient.
    """
    if angles is not None:
        tape.device.rotary(qkv.data, heads, kv_heads, *angles)
    if memory is not None:
        cache, name = memory
        if name not in cache.arrays:
            b, _, width = qkv.data.shape
            size = width // (heads + 2 * kv_heads) * 2 * kv_heads
            cache.arrays[name] = tape.device.empty((b, cache.capacity, size), qkv.data.dtype)
        return Tensor(tape.device.cached_attention(qkv.data, cache.arrays[name], cache.length, heads, kv_heads, scale))
    y, lse = tape.device.attention(qkv.data, heads, kv_heads, scale, segments)
    out = Tensor(y)
    return tape.record(out, attention_backward, qkv, out, lse, heads, kv_heads, scale, angles, segments)


def attention_backward(tape: Tape, dy: Array, qkv: Tensor, y: Tensor, lse: Array, heads: int, kv_heads: int, scale: float,
                       angles: tuple[Array, Array] | None, segments: Array | None) -> None:
    dqkv = tape.device.attention_backward(dy, qkv.data, y.data, lse, heads, kv_heads, scale, segments)
    if angles is not None:  # the rotation is orthogonal: its gradient is the rotation back
        tape.device.rotary(dqkv, heads, kv_heads, *angles, inverse=True)
    qkv.accumulate(dqkv, tape.device)


# -- residual stream -------------------------------------------------------------------------
def dropout(tape: Tape, x: Tensor, probability: float) -> Tensor:
    """Zero elements with `probability`, scale the rest; nothing is kept, backward draws the same mask again."""
    if probability == 0.0 or not tape.training:
        return x
    key = tape.random_key()
    return tape.record(tape.device.dropout(x.data, probability, key), dropout_backward, x, probability, key)


def dropout_backward(tape: Tape, dy: Array, x: Tensor, probability: float, key: tuple[int, int]) -> None:
    x.accumulate(tape.device.dropout(dy, probability, key), tape.device)


def residual(tape: Tape, x: Tensor, branch: Tensor, probability: float = 0.0) -> Tensor:
    """x + dropout(branch), written over the branch's array unless the branch's own rule needs that. Shapes equal."""
    if tape.recording and tape.entries and any(kept is branch or kept is branch.data for kept in tape.entries[-1][2]):
        y = tape.device.empty(branch.data.shape, branch.data.dtype)
        y[...] = branch.data
    else:
        y = branch.data
    key = None
    if probability > 0.0 and tape.training:
        key = tape.random_key()
        tape.device.dropout(y, probability, key, out=y)
    tape.device.add(y, x.data)
    return tape.record(y, residual_backward, x, branch, probability, key)


def residual_backward(tape: Tape, dy: Array, x: Tensor, branch: Tensor, probability: float, key: tuple[int, int] | None) -> None:
    # The same array goes both ways without a copy. Safe: the branch's rules run before anything is added to
    # x's gradient, because they were recorded after x was made, and no rule writes into its dy. But what is left of
    # the branch's rules for later would read what has been added since.
    branch.accumulate(dy if key is None else tape.device.dropout(dy, probability, key), tape.device)
    if tape.later is not None:
        own = tape.device.empty(dy.shape, dy.dtype)
        own[...] = dy
        dy = own
    x.accumulate(dy, tape.device)


# -- loss ------------------------------------------------------------------------------------
class Loss(Tensor):
    """A sum of token losses, in nats. `value` is there after forward in evaluation, after backward in training."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        super().__init__(None)
        self.value: float | None = None


def cross_entropy(tape: Tape, x: Tensor, table: Parameter, targets: Array, ignore_index: int = -100) -> Loss:
    """Sum over valid tokens of -log softmax(x @ table.T)[target]: x (b, t, d), table (v, d), targets (b, t) int64.

    Note: when a gradient is wanted the work is left to backward. The logits are never kept, so doing it here as
    well would make them twice; the one pass over chunks in backward yields the value and both gradients.
    """
    loss = Loss()
    if tape.recording:
        tape.entries.append((cross_entropy_backward, loss, (loss, x, table, targets, ignore_index)))
    else:
        loss.value, _ = tape.device.cross_entropy(
            rows(x.data), table.data, targets.reshape(-1), ignore_index, 1.0, None, False, want_dx=False)
    tape.after_op()
    return loss


def cross_entropy_backward(tape: Tape, dy: float, loss: Loss, x: Tensor, table: Parameter, targets: Array, ignore_index: int) -> None:
    target, accumulate = table.grad_target()
    loss.value, dx = tape.device.cross_entropy(
        rows(x.data), table.data, targets.reshape(-1), ignore_index, dy, target, accumulate, want_dx=x.wants_grad)
    if dx is not None:
        x.accumulate(dx.reshape(x.data.shape), tape.device)


def last_position(tape: Tape, x: Tensor) -> Tensor:
    """(b, t, d) -> (b, 1, d), a copy, for sampling: nobody reads the logits of a prompt. No gradient."""
    last = tape.device.empty((x.data.shape[0], 1, x.data.shape[2]), x.data.dtype)
    last[...] = x.data[:, -1:]
    return Tensor(last)


def logits(tape: Tape, x: Tensor, table: Parameter) -> Tensor:
    """x (b, t, d) @ table (v, d).T, for sampling: small inputs only, since the whole (b, t, v) exists."""
    y = tape.device.matmul(rows(x.data), table.data.T)
    return Tensor(y.reshape(*x.data.shape[:-1], -1))
