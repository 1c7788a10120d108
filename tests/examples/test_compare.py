"""The comparison's lines: both sides get the same shapes, and what it makes of their answers. The peers need PyTorch, which
the tests do not install, so they are played."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

import pytest

from mpshard import config, models
from tests.launch import ROOT

SPEC = importlib.util.spec_from_file_location("compare", ROOT / "examples/peers/compare.py")
compare = importlib.util.module_from_spec(SPEC)
sys.modules["compare"] = compare
SPEC.loader.exec_module(compare)


def peer_parameters(a: dict[str, str]) -> int:
    """Parameters of fsdp2_gpt.py's model, by its own formula: an untied head without bias, biases in GPT-2 alone."""
    d, layers, vocab, llama = int(a["d-model"]), int(a["layers"]), int(a["vocab"]), a["arch"] == "llama"
    ff = int(a["ff"]) or (int(8 * d / 3 / 64) * 64 if llama else 4 * d)
    if llama:
        return 2 * vocab * d + d + layers * (2 * d + 4 * d * d + 3 * d * ff)
    return 2 * vocab * d + int(a["seq"]) * d + 2 * d + layers * (4 * d + 4 * d * d + 4 * d + 2 * d * ff + ff + d)


@pytest.mark.parametrize("line", [line for line in compare.LINES if not line.hf], ids=lambda line: line.name)
def test_both_sides_get_the_same_work(line):
    settings = config.load(None, [*line.settings(""), f"train.global_batch_size={line.batch * line.ranks}"])
    config.validate(settings, line.ranks)
    words = line.peer_arguments("")
    peer = {name.removeprefix("--"): value for name, value in zip(words, words[1:], strict=False) if name.startswith("--")}
    assert models.from_config(settings.model).size == peer_parameters(peer)
    assert (settings.data.seq_len, settings.train.micro_batch_size) == (int(peer["seq"]), int(peer["batch"]))
    assert (settings.precision.param == "bf16") == ("--bf16" in words)


class Played(compare.Runner):
    def __init__(self, answers: dict[str, dict[str, Any]]) -> None:
        self.options = argparse.Namespace(rounds=3, deepspeed_python="", patience=0.0)
        self.env, self.mpiexec = {}, "mpiexec"
        self.answers, self.order = answers, []

    def mpshard(self, line):
        self.order.append("mpshard")
        return self.answers["mpshard"] | {"tokens_per_s": [300.0, 100.0, 240.0][len(self.order) // 2]}

    def fsdp2(self, line):
        self.order.append("fsdp2")
        return self.answers["fsdp2"]


REST = ("gemm_share", "gemm_gflops", "gflops", "wait_share", "hidden_fraction", "bytes_gathered", "bytes_reduced", "page_faults_per_step")
OURS = {"parameters": 7, "peak_rss_bytes": 50 << 20, **dict.fromkeys(REST, 0.5)}


def test_medians_and_ratios(capsys):
    runner = Played({"mpshard": OURS, "fsdp2": {"params": 7, "tokens_per_s": 120.0, "peak_rss_mb": 100}})
    found = compare.compare(compare.LINES[0], runner)
    assert runner.order == ["mpshard", "fsdp2"] * 3
    assert (found["speed"], found["memory"]) == (2.0, 0.5)
    assert compare.table([found]).row_count == 1


def test_other_work_is_no_comparison():
    runner = Played({"mpshard": OURS, "fsdp2": {"params": 8, "tokens_per_s": 120.0, "peak_rss_mb": 100}})
    with pytest.raises(SystemExit, match="not the same work"):
        compare.compare(compare.LINES[0], runner)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_run_that_fails_is_shown():
    runner = Played({})
    assert runner.run(python("print('noise'); print('{\"a\": 1}')"), {}, 1) == {"a": 1}
    with pytest.raises(SystemExit, match="exit status 3"):
        runner.run(python("raise SystemExit(3)"), {}, 1)


def test_a_peer_that_falls_over_after_its_result_has_given_it(capsys):
    runner, command = Played({}), python("print('{\"a\": 1}'); raise SystemExit(3)")
    assert runner.run(command, {}, 1) == {"a": 1}
    assert "ended with 3" in capsys.readouterr().err
    runner.mpiexec = sys.executable  # the command is then a run of ours, and has to end well
    with pytest.raises(SystemExit, match="exit status 3"):
        runner.run(command, {}, 1)
