"""The graphs that are given to cuDNN, checked by its real frontend where that is installed; it does so without a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.device import lazy_cupy


def test_the_real_frontend_takes_the_graphs(monkeypatch):
    cudnn = pytest.importorskip("cudnn")
    with lazy_cupy.installed():
        cupy_cudnn = import_module("mpshard.device.cupy_cudnn")  # not the package's attribute, which may be an earlier one

        attention = object.__new__(cupy_cudnn.Attention)
        attention.handle = None
        monkeypatch.setattr(cupy_cudnn, "Plan", lambda graph, tensors: graph.validate() or tensors)
        shape = cupy_cudnn.Shape(2, 96, 6, 2, 64, "bfloat16", 0.125)
        *_, y, lse = attention._forward(shape)
        assert (list(y.get_dim()), list(lse.get_dim()), list(lse.get_stride())) == ([2, 6, 96, 64], [2, 6, 96, 1], [576, 96, 1, 1])
        *_, dv = attention._backward(shape)
        assert list(dv.get_stride()) == [96 * 640, 64, 640, 1] and cudnn.data_type.BFLOAT16
