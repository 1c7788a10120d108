"""Where a device's products do what comes next (`mpshard.device.base.Epilogues`): linear layers ask here first and, where nothing
was done, which None or False says, go on as without. Products of 8 bits have none.
"""

from __future__ import annotations

from mpshard.autograd.tensor import Activated, Array, Parameter, Tape, Tensor


def with_gelu(tape: Tape, x: Array, weight: Array, bias: Array, transposed: bool) -> tuple[Array, Array | None] | None:
    """gelu of a linear layer of x (..., i) -> (..., o), and what it was taken of, if backward will want that.

    The first is not of the second as rounded: made again from it, it may differ in the last bit.
    """
    assert tape.device.epilogues is not None
    # What is not recorded in training will run again for backward, and is to be the same product both times.
    keep = tape.recording or tape.training
    made = tape.device.epilogues.gelu(x.reshape(-1, x.shape[-1]), weight if transposed else weight.T, bias, keep)
    if made is None:
        return None
    y, before = made
    shape = *x.shape[:-1], y.shape[-1]
    return y.reshape(shape), None if before is None else before.reshape(shape)


def past_gelu(tape: Tape, dy: Array, w: Array, y: Tensor) -> bool:
    """Add dy (n, o) @ w (o, i) to the gradient of what a GELU was taken of, past that of the GELU's result y (..., i).

    The GELU's own rule then finds no gradient, or what its result's other readers add.
    """
    x = y.of if isinstance(y, Activated) else None
    assert tape.device.epilogues is not None
    if tape.fp8 or x is None or y.grad is not None:
        return False
    dx = tape.device.epilogues.gelu_backward(dy, w, x.data.reshape(len(dy), -1))
    if dx is not None:
        x.accumulate(dx.reshape(x.data.shape), tape.device)
    return dx is not None


def weight_and_bias(tape: Tape, dy: Array, x: Array, weight: Parameter, bias: Parameter | None, transposed: bool) -> bool:
    """Both gradients of a linear layer, dy (n, o), x (n, i), by one product: where both are wanted, and nothing is there to add to."""
    assert tape.device.epilogues is not None
    if tape.fp8 or bias is None or weight.grad is None or bias.grad is None:
        return False
    if weight.grad_started or bias.grad_started or not tape.device.epilogues.linear_gradients(dy, x, weight.grad, bias.grad, transposed):
        return False
    for written in (weight, bias):
        written.grad_target()
    return True
