"""Attention over keys and values kept from earlier positions: what sampling needs, one token at a time."""

from __future__ import annotations

import numpy as np

from mpshard.device.numpy_attention import AttentionKernels


class CachedAttentionKernels(AttentionKernels):
    """`cached_attention` of `mpshard.device.base.Device`."""

    def cached_attention(
        self, qkv: np.ndarray, cache: np.ndarray, past: int, heads: int, kv_heads: int, scale: float
    ) -> np.ndarray:
        b, t, width = qkv.shape
        g, e = heads // kv_heads, width // (heads + 2 * kv_heads)
        cache[:, past : past + t] = qkv[:, :, heads * e :]
        if past == 0:
            return self.attention(qkv, heads, kv_heads, scale)[0]
        y = self.empty((b, t, heads * e), qkv.dtype)
        q = qkv[:, :, : heads * e].reshape(b, t, kv_heads, g, e).transpose(0, 2, 1, 3, 4).reshape(b, kv_heads, t * g, e)
        kv = cache[:, : past + t].reshape(b, past + t, 2, kv_heads, e).transpose(2, 0, 3, 1, 4)
        keys, values = kv[0], kv[1]  # (b, k, past + t, e)
        scores = (q * scale) @ keys.transpose(0, 1, 3, 2)  # (b, k, t g, past + t)
        later = np.arange(past + t) > np.repeat(np.arange(past, past + t), g)[:, None]
        np.copyto(scores, -np.inf, where=later)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        y.reshape(b, t, kv_heads, g, e)[:] = (scores @ values).reshape(b, kv_heads, t, g, e).transpose(0, 2, 1, 3, 4)
        return y
