"""Attention and rotary positions of the CuPy device: shapes and launches; the arithmetic is in `cupy_kernels/`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpshard.device.base import Array
from mpshard.device.cupy_memory import CupyMemory

WIDEST_HEAD = 256  # elements; the kernels keep a strip of a head in registers


class AttentionKernels(CupyMemory):
    """The attention part of `mpshard.device.base.Device`.

    attention_library: cuDNN's, see `cupy_cudnn`, for what it has a plan for; None: all is done by the own kernels.
    """

    attention_library: Any = None

    def rotary(
        self, qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array, inverse: bool = False
    ) -> None:
        b, t, width = qkv.shape
        half, turned = cos.shape[-1], heads + kv_heads
        if qkv.size and half:
            args = (qkv, cos, sin, b * t, turned, half, width, cos.size // half, inverse)
            self.launch("rotary", (min(b * t, 1 << 16),), 128, args, qkv.dtype, cos.dtype)

    def attention(
        self, qkv: Array, heads: int, kv_heads: int, scale: float, segments: Array | None = None
    ) -> tuple[Array, Array]:
        shape = _Shape(qkv, heads, kv_heads)
        y = self.empty((shape.b, shape.t, heads * shape.e), qkv.dtype)
        lse = self.empty((shape.b, heads, shape.t), shape.wide)
        library = self.attention_library if segments is None and y.size else None
        if library is not None and library.forward(qkv, heads, kv_heads, scale, y, lse):
            return y, lse
        if y.size:
            args = (qkv, 0 if segments is None else segments, y, lse, *shape.args, float(scale))
            self.launch("attention", (shape.tiles, heads, shape.b), shape.threads, args, qkv.dtype,
                        shared=shape.shared(tiles=3, columns=0), **shape.constants)
        return y, lse

    def attention_backward(
        self, dy: Array, qkv: Array, y: Array, lse: Array, heads: int, kv_heads: int, scale: float,
        segments: Array | None = None,
    ) -> Array:
        shape = _Shape(qkv, heads, kv_heads)
        dqkv = self.empty(qkv.shape, qkv.dtype)
        if not y.size:
            return dqkv
        library = self.attention_library if segments is None else None
        if library is not None and library.backward(dy, qkv, y, lse, heads, kv_heads, scale, dqkv):
            return dqkv
        dots = self.empty(lse.shape, shape.wide)
        items = shape.b * shape.t * heads  # a warp each
        self.launch("attention_dots", (-(-items // 4),), 128, (dy, y, dots, shape.t, heads, shape.e, items), qkv.dtype,
                    **shape.constants)
        args = (dy, qkv, lse, dots, 0 if segments is None else segments, dqkv, *shape.args, float(scale))
        for kernel, walkers in (("attention_backward_keys", kv_heads), ("attention_backward_queries", heads)):
            self.launch(kernel, (shape.tiles, walkers, shape.b), shape.threads, args, qkv.dtype,
                        shared=shape.shared(tiles=4, columns=2), **shape.constants)
        return dqkv

    def cached_attention(
        self, qkv: Array, cache: Array, past: int, heads: int, kv_heads: int, scale: float
    ) -> Array:
        shape = _Shape(qkv, heads, kv_heads)
        width, kept, capacity = qkv.shape[2], cache.shape[2], cache.shape[1]
        y = self.empty((shape.b, shape.t, heads * shape.e), qkv.dtype)
        rows = shape.b * shape.t
        if rows and kept:
            args = (qkv, cache, shape.t, past, capacity, width, kept, rows)
            self.launch("cache_append", (min(rows, 1 << 16),), 128, args, qkv.dtype)
            inputs = (qkv, cache, y, shape.t, past, capacity, heads, kv_heads, shape.e, float(scale))
            self.launch("cached_attention", (shape.t, heads, shape.b), 128, inputs, qkv.dtype)
        return y


class _Shape:
    """How one call's heads are cut into tiles. See the notes in attention.cu and tile.cuh."""

    def __init__(self, qkv: Array, heads: int, kv_heads: int) -> None:
        self.b, self.t, width = qkv.shape
        self.e = width // (heads + 2 * kv_heads)
        if self.e > WIDEST_HEAD:
            raise ValueError(f"heads {self.e} wide do not fit the attention kernels; at most {WIDEST_HEAD}")
        self.itemsize = qkv.dtype.itemsize
        self.wide: np.dtype[Any] = np.dtype(np.float64 if self.itemsize == 8 else np.float32)
        self.tile = 64 if self.itemsize == 2 else 32  # what fits registers and shared memory
        self.head = -(-self.e // 16) * 16
        self.tiles = -(-self.t // self.tile)
        self.threads = 2 * self.tile
        self.constants = {"TILE": self.tile, "HEAD": self.head}
        self.args = (self.t, heads, kv_heads, self.e)

    def shared(self, tiles: int, columns: int) -> int:
        """Bytes of shared memory: tiles (TILE, HEAD), one of scores (TILE, TILE), and columns of lse and the like."""
        pad = 16 // self.itemsize
        rows = tiles * (self.head + pad) + self.tile + pad
        return self.tile * (rows * self.itemsize + columns * self.wide.itemsize)
