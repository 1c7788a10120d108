"""What the kernels are compared with: plain float64 formulas, and finite differences for every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np


def slope(function: Callable[[], float], array: np.ndarray, direction: np.ndarray, step: float = 1e-5) -> float:
    """Derivative of function() as the float64 `array` moves along `direction` (central differences, error ~ step^2)."""
    kept = array.copy()
    array += step * direction
    above = function()
    array[...] = kept - step * direction
    below = function()
    array[...] = kept
    return (above - below) / (2 * step)


def layer_norm(x, weight, bias, eps):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def gelu(x, approximate):
    if approximate:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))


def swiglu(gate_up):
    gate, up = np.split(gate_up, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def fp8(x, gradient):
    """x times the power of two that brings it under the format's largest number, rounded by ml_dtypes, back; float64."""
    form = ml_dtypes.float8_e5m2 if gradient else ml_dtypes.float8_e4m3fn
    largest = np.abs(x).astype(np.float64).max(initial=0.0)
    scale = 1.0 if largest == 0 else 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(form).max) / largest))
    return (x.astype(np.float64) * scale).astype(form).astype(np.float64) / scale


def rotary(x, cos, sin):
    """One head x (b, t, e); cos, sin (t, e/2) or (b, t, e/2)."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(qkv, heads, kv_heads, scale, segments=None):
    """Softmax over a full t x t matrix. -> y, lse."""
    b, t, width = qkv.shape
    e = width // (heads + 2 * kv_heads)
    x = qkv.reshape(b, t, -1, e).transpose(0, 2, 1, 3)
    q, k, v = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    k, v = (a.repeat(heads // kv_heads, axis=1) for a in (k, v))
    seen = np.tril(np.ones((t, t), bool))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = np.where(seen, q @ k.transpose(0, 1, 3, 2) * scale, -np.inf)
    top = scores.max(-1, keepdims=True)
    total = np.exp(scores - top).sum(-1, keepdims=True)
    y = np.exp(scores - top) / total @ v
    return y.transpose(0, 2, 1, 3).reshape(b, t, heads * e), (np.log(total) + top)[..., 0]


def cross_entropy(x, table, targets, ignore_index):
    valid = targets != ignore_index
    logits = x[valid] @ table.T
    top = logits.max(-1, keepdims=True, initial=-1e300)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return float((lse - logits[np.arange(len(lse)), targets[valid]]).sum())
