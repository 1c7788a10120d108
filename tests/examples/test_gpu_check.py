"""The script for a GPU, tried out on the stand-in for CuPy, so that it does not fail where minutes of a GPU are counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.device import cuda_on_cpu, lazy_cupy, lazy_nvidia

SCRIPT = Path(__file__).parents[2] / "examples" / "gpu_check.py"
pytestmark = [pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing())), pytest.mark.mpi]


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with lazy_cupy.installed():
        yield module


def test_its_parts(check, tmp_path, capsys):
    results = {part.__name__: json.loads(json.dumps(part(check.SMALL, tmp_path)))
               for part in (check.rates, check.numpy_and_cupy, check.precisions, check.llama)}
    assert results["numpy_and_cupy"]["difference"] < 1e-4
    assert results["llama"]["tokens_per_s"] > 0 and json.loads((tmp_path / "trace.json").read_text())
    with lazy_nvidia.installed():
        found = check.libraries(check.SMALL, tmp_path)
    assert found["left_out"] == "nothing" and "attention by cuDNN" in found["device"] and found["attention_times_as_fast"] > 0
    assert found["fp8_products"] == "by cuBLASLt 0"
    assert max(found[f"fp8_{name}_difference"] for name in ("forward", "inputs", "weights")) < 0.01
    for name in ("gelu", "gelu_backward", "gradients", "gradients_fp32"):
        assert found[f"product_with_{name}_times_as_fast"] > 0
    assert all(found[f"{kind}_{name}_units"] <= 2 for kind in ("bf16", "fp16") for name in ("gelu", "gelu_backward", "gradients"))
    assert found["fp32_gradients_units"] <= 8 and "fp32_gelu_units" not in found
    assert found["fp8_product_alone_tflops"] >= 0 and results["precisions"]["bf16_fp8"] > 0
    results["rates"] |= {"matmul_bf16_tflops": 790.0}
    results["pytorch"] = {"tokens_per_s": 1.0, "peak_bytes": 1}
    results["kernels"] = {"failed": "on purpose"}
    results["together"] = check.conclusions(results)
    assert set(results["together"]) == {"share_of_the_matrix_rate", "speed_over_pytorch", "memory_over_pytorch"}
    check.show(results)
    assert "on purpose" in capsys.readouterr().out


def test_losses_that_differ_are_a_failure(check):
    assert check.apart([1.0, 2.0], [1.0, 2.0], 0.0) == 0.0
    for wrong in ([1.0, 2.1], [1.0, float("nan")]):
        with pytest.raises(AssertionError, match="losses differ"):
            check.apart(wrong, [1.0, 2.0], 1e-2)


def test_a_part_that_fails_is_told(check, tmp_path, monkeypatch):
    """There is no GPU here: a part in a process of its own says so and the script goes on."""
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1]))
    found = check.run("rates", tmp_path)
    assert "cannot be used" in found["failed"] and (tmp_path / "rates.log").exists()
