"""The benchmarks run, alone and on ranks, and say what they did; nothing here looks at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpshard.models import GPT2Config, gpt2
from mpshard.plan import plan
from mpshard.shard.options import Options
from tests.launch import launch

pytestmark = pytest.mark.mpi

TINY = ["model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.vocab_size=101", "data.seq_len=16", "train.micro_batch_size=2"]
# What DESIGN promises of `bench step --json`.
KEYS = {"tokens_per_s", "step_s", "gemm_share", "gather_wait_s", "reduce_wait_s", "hidden_fraction", "bytes_gathered",
        "bytes_reduced", "peak_rss_bytes", "peak_bytes"}


def bench(ranks: int, *arguments: str) -> dict[str, Any]:
    done = launch(ranks, ["-m", "mpshard", "bench", *arguments, "--json"])
    assert done.returncode == 0, done.report()
    return json.loads(done.stdout)  # one object on rank 0's output, nothing else on anybody's


@pytest.mark.parametrize("ranks", [1, 2])
def test_step(ranks):
    found = bench(ranks, "step", *TINY, "shard.transport=mpi", "--steps", "2", "--warmup", "1")
    assert found.keys() >= KEYS and found["world_size"] == ranks
    assert found["tokens"] == ranks * 2 * 16
    model = gpt2(GPT2Config(n_layers=2, d_model=32, n_heads=2, vocab_size=101, max_seq_len=16))
    planned = plan(model, Options(transport="mpi"), ranks)
    assert (found["bytes_gathered"], found["bytes_reduced"]) == (planned.bytes_gathered, planned.bytes_reduced)
    assert 0 <= found["hidden_fraction"] <= 1 and 0 < found["peak_bytes"] < found["peak_rss_bytes"]


def test_step_of_a_file(tmp_path):
    (tmp_path / "tiny.toml").write_text('[model]\nn_layers = 1\nd_model = 16\nn_heads = 2\n[train]\nglobal_batch_size = 8\n')
    found = bench(2, "step", str(tmp_path / "tiny.toml"), "train.micro_batch_size=2", "data.seq_len=8", "--steps", "1", "--no-gemm")
    assert found["tokens"] == 8 * 8 and "gemm_share" not in found


def test_overhead():
    found = bench(2, "step", *TINY, "train.global_batch_size=8", "--steps", "1", "--no-gemm", "--overhead")
    assert 0 < found["overhead_cpu_s"] and found["overhead_share"] == found["overhead_cpu_s"] / found["cpu_s"]


def test_a_bad_setting_is_one_line():
    done = launch(2, ["-m", "mpshard", "bench", "step", "model.n_layer=2"])
    assert done.returncode == 2
    assert "did you mean model.n_layers" in done.stderr and "Traceback" not in done.stderr and not done.stdout
    done = launch(2, ["-m", "mpshard", "bench", "step", "model.init_from=nowhere", "--overhead", "--no-gemm"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout, done.report()


def test_gemm():
    found = bench(2, "gemm", "--shape", "8,16,32")
    assert [(row["rows"], row["inner"], row["columns"]) for row in found["products"]] == [(8, 16, 32)]
    assert all(found["products"][0][name] > 0 for name in ("forward", "dx", "dw")) and found["gflops"] > 0


def test_collectives():
    found = bench(2, "collectives", "--bytes", "1e4")
    kinds = [(row["transport"], row["collective"]) for row in found["rows"]]
    names = ["mpi, reduce-scatter", "mpi, all-to-all"] + ([] if found["no_shm"] else ["shm"])
    assert kinds == [(name, verb) for name in names for verb in ("gather", "reduce")]
    assert all(0 <= row["hidden_fraction"] <= 1 and row["seconds"] > 0 for row in found["rows"])


def test_collectives_need_somebody_to_talk_to():
    done = launch(1, ["-m", "mpshard", "bench", "collectives"])
    assert done.returncode == 2 and "2 ranks" in done.stderr


def test_tables_are_drawn():
    done = launch(1, ["-m", "mpshard", "bench", "step", *TINY, "--steps", "1", "--warmup", "1"])
    assert done.returncode == 0 and "tokens/s, all ranks" in done.stdout, done.report()
