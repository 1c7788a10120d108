"""mpshard and its peers on the same work, one after the other, several times: medians and ratios.

    python examples/peers/compare.py --peer-python PEER_ENV/bin/python [--line gpt2 --line llama ...] [--rounds 3]

Run it with the Python that has mpshard and its mpirun, on an otherwise idle machine with two cores. Every line runs
mpshard, peer, mpshard, peer, ... in fresh processes; what is compared are medians over the rounds of each run's own
median step. Both do the same: equal shapes (the numbers of parameters must agree), random tokens, AdamW without decay
on 1-D parameters, clipping at 1.0. One BLAS thread and one core a rank.

The line "two hosts" needs `--hosts A,B --shell SSH`: this script runs on A, MPICH's mpiexec and the peer's second rank
reach B with `SSH B COMMAND`. Its figures mean something where the link is the bottleneck.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
LIMIT = 900  # seconds a run
# What would slow one side down without the other's knowing.
THROTTLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Line:
    """One row of the table: the work, and what mpshard should reach: `speed` times the peer's tokens/s with `memory` times
    its peak resident memory. hf: shapes and weights come from a Hugging Face directory. apart: one rank on each of two hosts."""

    name: str
    arch: str = "gpt2"
    layers: int = 6
    d_model: int = 512
    heads: int = 8
    ff: int = 0
    seq: int = 256
    batch: int = 8
    vocab: int = 8192
    ranks: int = 2
    bf16: bool = False
    hf: bool = False
    apart: bool = False
    speed: float = 1.0
    memory: float = 1.0

    def settings(self, directory: str) -> list[str]:
        """For `mpshard bench step`."""
        words = [f"data.seq_len={self.seq}", f"train.micro_batch_size={self.batch}", "optim.lr=1e-3", "optim.weight_decay=0.1",
                 "optim.clip_grad_norm=1.0", *["precision.param=bf16"] * self.bf16]
        if self.hf:
            return [*words, f"model.init_from={directory}"]
        return [*words, f"model.arch={self.arch}", f"model.n_layers={self.layers}", f"model.d_model={self.d_model}",
                f"model.n_heads={self.heads}", f"model.d_ff={self.ff}", f"model.vocab_size={self.vocab}", "model.tie_embeddings=false"]

    def peer_arguments(self, directory: str) -> list[str]:
        """For fsdp2_gpt.py."""
        shapes = {"arch": self.arch, "layers": self.layers, "d-model": self.d_model, "heads": self.heads, "ff": self.ff,
                  "vocab": self.vocab}
        words = {"seq": self.seq, "batch": self.batch, "mode": "single" if self.ranks == 1 else "fsdp"}
        words |= {"hf": directory} if self.hf else shapes
        return [part for name, value in words.items() for part in (f"--{name}", str(value))] + ["--bf16"] * self.bf16


LINES = (
    Line("gpt2", speed=1.22, memory=0.5),
    Line("llama", arch="llama", ff=1344, speed=1.22, memory=0.5),  # the peer's 8/3 d, rounded down to a multiple of 64
    Line("gpt2 seq 1024", seq=1024, batch=2, speed=1.35, memory=0.5),
    Line("smollm2", hf=True, batch=2, speed=1.6, memory=0.55),
    Line("small layers", layers=24, d_model=256, heads=4, seq=64, batch=1, speed=3.5),
    Line("one rank", ranks=1, speed=1.15),
    Line("bf16", bf16=True, speed=1.0),
    Line("two hosts", apart=True, speed=2.2),
)


class Runner:
    """Runs one side once and returns what it printed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.env = {name: value for name, value in os.environ.items() if name not in THROTTLES}
        beside = Path(sys.executable).parent / "mpiexec"
        self.mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
        if self.mpiexec is None:
            sys.exit("no mpiexec beside this Python or on PATH")

    def mpshard(self, line: Line) -> dict[str, Any]:
        bench = [sys.executable, "-m", "mpshard", "bench", "step", *line.settings(self.options.smollm2),
                 "--steps", str(self.options.steps), "--warmup", "2", "--json"]
        if not line.apart:
            return self.run([self.mpiexec, "-n", str(line.ranks), *bench], {}, line.ranks)
        first, second = ([*self.on_core(rank), *bench] for rank in range(2))
        hosts = self.options.hosts
        command = [self.mpiexec, "-hosts", ",".join(hosts), "-ppn", "1", "-n", "1", *first, ":", "-n", "1", *second]
        return self.run(command, {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": self.options.shell}, 2)

    def fsdp2(self, line: Line) -> dict[str, Any]:
        work = [str(HERE / "fsdp2_gpt.py"), *line.peer_arguments(self.options.smollm2),
                "--steps", str(self.options.steps + 2), "--warmup", "2"]
        if not line.apart:
            return self.run([*self.torchrun(self.options.peer_python, line.ranks), *work], {"OMP_NUM_THREADS": "1"}, line.ranks)
        host, port = self.options.hosts[0], 29500 + os.getpid() % 1000
        first, second = (
            ["env", f"RANK={rank}", "WORLD_SIZE=2", f"MASTER_ADDR={host}", f"MASTER_PORT={port}", "OMP_NUM_THREADS=1",
             *self.on_core(rank), self.options.peer_python, *work] for rank in range(2))
        with subprocess.Popen([self.options.shell, self.options.hosts[1], *second], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as other:
            try:
                return self.run(first, {}, 2)
            finally:
                other.terminate()

    def deepspeed(self, line: Line) -> dict[str, Any]:
        shapes = [line.layers, line.d_model, line.heads, line.seq, line.batch, self.options.steps + 2]
        command = [*self.torchrun(self.options.deepspeed_python, line.ranks), str(HERE / "deepspeed_zero3.py"), *map(str, shapes)]
        return self.run(command, {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}, line.ranks)

    def on_core(self, rank: int) -> list[str]:
        """On two hosts the ranks take different cores, for the hosts may be virtual and share them."""
        cores = sorted(os.sched_getaffinity(0))
        return ["taskset", "-c", str(cores[rank % len(cores)])]

    def torchrun(self, python: str, ranks: int) -> list[str]:
        return [python] if ranks == 1 else [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]

    def run(self, command: Sequence[str], extra: Mapping[str, str], ranks: int) -> dict[str, Any]:
        """The JSON object that the command prints; one core a rank."""
        wait_until_idle(self.options.patience)
        cores = sorted(os.sched_getaffinity(0))[:ranks]
        done = subprocess.run(command, env=self.env | dict(extra), capture_output=True, text=True, timeout=LIMIT, check=False,
                              preexec_fn=lambda: os.sched_setaffinity(0, cores))
        objects = [text for text in done.stdout.splitlines() if text.startswith("{")]
        peer = command[0] != self.mpiexec
        if peer and done.returncode and len(objects) == 1:  # its process group has been seen to fall over when taken down
            print(f"{Path(command[0]).name} said its result and then ended with {done.returncode}: {' '.join(command)}", file=sys.stderr)
        elif done.returncode or len(objects) != 1:
            sys.exit(f"$ {' '.join(command)}\nexit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(objects[0])


def wait_until_idle(patience: float) -> None:
    """Return when nobody else computes here, or after `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = cpu_times()
        time.sleep(3)
        spent = [now - then for now, then in zip(cpu_times(), before, strict=True)]
        if spent[3] >= 0.9 * sum(spent):
            return


def cpu_times() -> list[int]:
    """What all cores did so far, in ticks: user, nice, system, idle, ... See proc(5)."""
    return [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def compare(line: Line, runner: Runner) -> dict[str, Any]:
    """A B A B ... and what came of it."""
    sides = {"mpshard": runner.mpshard, "fsdp2": runner.fsdp2}
    if runner.options.deepspeed_python and line.arch == "gpt2" and line.ranks > 1 and not (line.bf16 or line.hf or line.apart):
        sides["deepspeed"] = runner.deepspeed
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(runner.options.rounds):
        for side, run in sides.items():
            runs[side].append(run(line))
    ours, theirs = runs["mpshard"], runs["fsdp2"]
    if ours[0]["parameters"] != theirs[0]["params"]:
        sys.exit(f"{line.name}: mpshard has {ours[0]['parameters']:,} parameters, the peer {theirs[0]['params']:,}: not the same work")
    found: dict[str, Any] = {"line": line.name, "parameters": ours[0]["parameters"], "speed_goal": line.speed, "memory_goal": line.memory}
    for side, results in runs.items():
        rss = [run["peak_rss_bytes"] / 2**20 if side == "mpshard" else run["peak_rss_mb"] for run in results]
        found[side] = {"tokens_per_s": statistics.median(run["tokens_per_s"] for run in results),
                       "all_tokens_per_s": [run["tokens_per_s"] for run in results], "peak_rss_mb": statistics.median(rss)}
    for name in ("gemm_share", "gemm_gflops", "gflops", "wait_share", "hidden_fraction", "bytes_gathered", "bytes_reduced",
                 "page_faults_per_step"):
        found["mpshard"][name] = statistics.median(run[name] for run in ours)
    found["speed"] = found["mpshard"]["tokens_per_s"] / found["fsdp2"]["tokens_per_s"]
    found["memory"] = found["mpshard"]["peak_rss_mb"] / found["fsdp2"]["peak_rss_mb"]
    if "deepspeed" in found:
        found["speed_against_deepspeed"] = found["mpshard"]["tokens_per_s"] / found["deepspeed"]["tokens_per_s"]
    return found


def table(results: Sequence[dict[str, Any]]) -> Table:
    drawn = Table(title="tokens/s of all ranks, MB of the largest rank; medians")
    for name in ("line", "mpshard", "FSDP2", "ratio", "goal", "MB", "MB", "ratio", "goal", "DeepSpeed", "of gemm", "waits", "hidden"):
        drawn.add_column(name, justify="left" if name == "line" else "right")
    for r in results:
        ours, peer = r["mpshard"], r["fsdp2"]
        drawn.add_row(
            r["line"], f"{ours['tokens_per_s']:,.0f}", f"{peer['tokens_per_s']:,.0f}", mark(r["speed"], r["speed"] >= r["speed_goal"]),
            f"{r['speed_goal']:.2f}", f"{ours['peak_rss_mb']:,.0f}", f"{peer['peak_rss_mb']:,.0f}",
            mark(r["memory"], r["memory"] <= r["memory_goal"]), f"{r['memory_goal']:.2f}",
            f"{r['deepspeed']['tokens_per_s']:,.0f}" if "deepspeed" in r else "", f"{ours['gemm_share']:.0%}",
            f"{ours['wait_share']:.1%}", f"{ours['hidden_fraction']:.0%}")
    return drawn


def mark(value: float, good: bool) -> str:
    return f"[{'green' if good else 'red'}]{value:.2f}[/]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [line.name for line in LINES]
    parser.add_argument("--peer-python", required=True, help="of an environment with torch (and transformers for smollm2)")
    parser.add_argument("--deepspeed-python", default="", help="of an environment with deepspeed, to compare with that, too")
    parser.add_argument("--smollm2", default="", metavar="DIR", help="the SmolLM2-135M directory; without it that line is left out")
    parser.add_argument("--hosts", type=lambda text: text.split(","), metavar="A,B", help="for the line of two hosts")
    parser.add_argument("--shell", default="ssh", help="runs a command on a host (default ssh)")
    parser.add_argument("--line", action="append", choices=names, help=f"one of {', '.join(names)}; default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--patience", type=float, default=30, metavar="SECONDS", help="to wait before each run for an idle machine")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    options = parser.parse_args()
    runner, console, results = Runner(options), Console(width=140), []
    for line in LINES:
        if line.name in (options.line or names) and (options.smollm2 or not line.hf) and (options.hosts or not line.apart):
            results.append(compare(line, runner))
            if options.json:  # as they come: a whole table takes an hour
                Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
            console.print(f"{line.name}: {results[-1]['speed']:.2f} x the speed, {results[-1]['memory']:.2f} x the memory")
    console.print(table(results))


if __name__ == "__main__":
    main()
