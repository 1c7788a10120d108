"""Attention by cuDNN, through NVIDIA's frontend (`nvidia-cudnn-frontend`), for the CuPy device.

cuDNN takes 16-bit types and whole causal sequences. What it computes is described to it as a graph, of which it makes a plan: one
for each shape, at its first use, kept. Where it has no plan for a shape, the device's own kernels do it. Both write the same
log-sum-exp, so either can run backward after the other's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cudnn
import numpy as np

from mpshard.device.base import Array
from mpshard.device.cupy_memory import CupyMemory

TYPES = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}


@dataclass(frozen=True)
class Shape:
    """What a plan is made for: b sequences of t positions, h query heads and k key/value heads of width e, type, scale."""

    b: int
    t: int
    h: int
    k: int
    e: int
    dtype: str
    scale: float

    def heads(self, count: int, width: int) -> dict[str, Any]:
        """Of `count` heads that lie next to each other in rows `width` wide, in cuDNN's order of dimensions."""
        return {"dim": [self.b, count, self.t, self.e], "stride": [self.t * width, self.e, width, 1]}

    @property
    def row(self) -> int:
        """Elements of a row of qkv."""
        return (self.h + 2 * self.k) * self.e

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Of q, k, v: how many heads, and where in a row they begin."""
        return (self.h, 0), (self.k, self.h * self.e), (self.k, (self.h + self.k) * self.e)


class Plan:
    """An executable graph and, in a fixed order, its tensors."""

    def __init__(self, graph: Any, tensors: list[Any]) -> None:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph, self.tensors, self.workspace = graph, tensors, max(1, graph.get_workspace_size())

    def run(self, device: CupyMemory, handle: Any, addresses: list[int]) -> None:
        workspace = device.empty(self.workspace, np.uint8)  # goes back at once: who gets it next runs after on the same stream
        self.graph.execute(dict(zip(self.tensors, addresses, strict=True)), workspace.data.ptr, handle=handle)


class Attention:
    """cuDNN on a device's compute stream.

    Raises whatever the libraries raise where they cannot be used; see `cupy_libraries`.
    """

    def __init__(self, device: CupyMemory) -> None:
        self.device, self.handle = device, cudnn.create_handle()
        cudnn.set_stream(self.handle, device.compute.ptr)
        self.about = f"cuDNN {cudnn.backend_version_string()}"
        self._plans: dict[tuple[str, Shape], Plan | None] = {}

    def forward(self, qkv: Array, heads: int, kv_heads: int, scale: float, y: Array, lse: Array) -> bool:
        """As `Device.attention`, into y and lse. False if cuDNN has no plan, and nothing was done."""
        shape = _shape(qkv, heads, kv_heads, scale)
        plan = self._plan("forward", shape, self._forward)
        if plan is not None:
            plan.run(self.device, self.handle, [*_addresses(qkv, shape), y.data.ptr, lse.data.ptr])
        return plan is not None

    def backward(self, dy: Array, qkv: Array, y: Array, lse: Array, heads: int, kv_heads: int, scale: float, dqkv: Array) -> bool:
        """As `Device.attention_backward`, into dqkv. False if cuDNN has no plan, and nothing was done."""
        shape = _shape(qkv, heads, kv_heads, scale)
        plan = self._plan("backward", shape, self._backward)
        if plan is not None:
            plan.run(self.device, self.handle, [*_addresses(qkv, shape), y.data.ptr, dy.data.ptr, lse.data.ptr, *_addresses(dqkv, shape)])
        return plan is not None

    def _plan(self, way: str, shape: Shape, make: Callable[[Shape], Plan]) -> Plan | None:
        key = way, shape
        if key not in self._plans:
            try:
                self._plans[key] = make(shape) if shape.dtype in TYPES and shape.e % 8 == 0 else None
            except cudnn.cudnnGraphNotSupportedError:
                self._plans[key] = None
        return self._plans[key]

    def _graph(self, shape: Shape) -> tuple[Any, list[Any]]:
        """A graph with q, k, v."""
        graph = cudnn.pygraph(io_data_type=TYPES[shape.dtype], intermediate_data_type=cudnn.data_type.FLOAT,
                              compute_data_type=cudnn.data_type.FLOAT, handle=self.handle)
        return graph, [graph.tensor(name=name, data_type=TYPES[shape.dtype], **shape.heads(count, shape.row))
                       for name, (count, _) in zip("qkv", shape.parts, strict=True)]

    def _forward(self, shape: Shape) -> Plan:
        graph, (q, k, v) = self._graph(shape)
        y, lse = graph.sdpa(name="attention", q=q, k=k, v=v, is_inference=False, attn_scale=shape.scale, use_causal_mask=True)
        output = shape.heads(shape.h, shape.h * shape.e)
        y.set_output(True).set_dim(output["dim"]).set_stride(output["stride"])
        lse.set_output(True).set_data_type(cudnn.data_type.FLOAT)
        return Plan(graph, [q, k, v, y, lse])

    def _backward(self, shape: Shape) -> Plan:
        graph, (q, k, v) = self._graph(shape)
        output = shape.heads(shape.h, shape.h * shape.e)
        y, dy = (graph.tensor(name=name, data_type=TYPES[shape.dtype], **output) for name in ("y", "dy"))
        lse = graph.tensor(name="lse", dim=[shape.b, shape.h, shape.t, 1], stride=[shape.h * shape.t, shape.t, 1, 1],
                           data_type=cudnn.data_type.FLOAT)
        made = graph.sdpa_backward(name="attention_backward", q=q, k=k, v=v, o=y, dO=dy, stats=lse, attn_scale=shape.scale,
                                   use_causal_mask=True, use_deterministic_algorithm=True)
        for gradient, (count, _) in zip(made, shape.parts, strict=True):
            place = shape.heads(count, shape.row)
            gradient.set_output(True).set_dim(place["dim"]).set_stride(place["stride"])
        return Plan(graph, [q, k, v, y, dy, lse, *made])


def _shape(qkv: Array, heads: int, kv_heads: int, scale: float) -> Shape:
    b, t, width = qkv.shape
    return Shape(b, t, heads, kv_heads, width // (heads + 2 * kv_heads), qkv.dtype.name, float(scale))


def _addresses(qkv: Array, shape: Shape) -> list[int]:
    """Of q, k and v, which lie in the same rows."""
    return [qkv.data.ptr + offset * qkv.itemsize for _, offset in shape.parts]
