"""`mpshard bench step`: whole training steps on random tokens, and what they took."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard import config as configuration
from mpshard.bench import gemm, overhead
from mpshard.bench.work import matrix_parameters, products, step_flops
from mpshard.comm import collectives
from mpshard.config import Config
from mpshard.device.base import Kind
from mpshard.device.blas import blas_info
from mpshard.shard import StepOutput
from mpshard.train import build_model

if TYPE_CHECKING:
    from mpi4py import MPI


def load(path: str | None, settings: Sequence[str], world: int) -> Config:
    """The configuration to measure. Without a file the batch is one micro-batch a rank unless `settings` say otherwise."""
    if path is None:
        micro = configuration.load(None, settings).train.micro_batch_size
        settings = [f"train.global_batch_size={micro * world}", *settings]
    loaded = configuration.load(path, settings)
    configuration.validate(loaded, world)
    return loaded


def measure(config: Config, comm: MPI.Comm, steps: int, warmup: int, with_gemm: bool = True,
            with_overhead: bool = False) -> dict[str, Any]:
    """Run `warmup` + `steps` steps and, if wanted, the same matrix products alone, and the same instructions on almost nothing.
    Collective; the result is the same on all.

    Times are the slowest rank's, medians over the steps; bytes and faults are the largest rank's.
    """
    sharded, optim = build_model(config, comm)
    micro, t = config.train.micro_batch_size, config.data.seq_len
    per_rank = config.train.global_batch_size // (micro * comm.size)
    random = np.random.default_rng([config.train.seed, comm.rank])
    times, outputs = [], []
    for step in range(warmup + steps):
        if step == warmup:
            sharded.device.memory.reset_peak()
            faults, cpu = _usage()
        start = time.perf_counter()
        tokens = random.integers(config.model.vocab_size, size=(per_rank, micro, t + 1))
        output = sharded.step((tokens[..., :-1], tokens[..., 1:]))
        updating = time.perf_counter()
        optim.step(output)
        end = time.perf_counter()
        if step >= warmup:
            times.append((end - start, end - updating))
            outputs.append(output)
    usage = np.subtract(_usage(), (faults, cpu)) / steps
    memory = sharded.device.memory.peak(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = _summary(comm, times, outputs, usage, memory)
    flops = step_flops(sharded.model, config.train.global_batch_size * t, t) / comm.size
    found |= {"gflops": flops / found["step_s"] / 1e9}
    peaks = collectives.all_max(comm, np.array([sharded.device.memory.peak(kind) for kind in Kind], np.float64))
    found |= {"peak_bytes_by_kind": {kind.value: int(peak) for kind, peak in zip(Kind, peaks, strict=True)}}
    if with_gemm:
        ceiling = gemm.measure(sharded.device, comm, products(sharded.model, micro * t))
        found |= {"gemm_gflops": ceiling["gflops"], "gemm_share": found["gflops"] / ceiling["gflops"]}
    about = {"world_size": comm.size, "steps": steps, "arch": config.model.arch, "parameters": sharded.model.size,
             "matrix_parameters": matrix_parameters(sharded.model), "strategy": config.shard.strategy,
             "transport": sharded.transport.name, "progress": sharded.progress.name, "device": sharded.device.name,
             "blas_threads": blas_info().threads}
    sharded.close()
    if with_overhead:
        nothing = overhead.measure(config, comm, 4 * steps)
        found |= {"overhead_cpu_s": nothing, "overhead_share": nothing / found["cpu_s"]}
    return found | about


def _usage() -> tuple[float, float]:
    """Minor page faults and seconds of CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt, used.ru_utime + used.ru_stime


def _summary(comm: MPI.Comm, times: Sequence[tuple[float, float]], outputs: Sequence[StepOutput], usage: np.ndarray,
             memory: tuple[int, int]) -> dict[str, Any]:
    counters = [output.counters for output in outputs]
    # One row a step: each step lasts as long as it does on its slowest rank.
    names = ["step_s", "optim_s", "forward_s", "backward_s", "gather_wait_s", "reduce_wait_s"]
    rows = [[*time_s, c.forward_s, c.backward_s, c.gather_wait_s, c.reduce_wait_s] for time_s, c in zip(times, counters, strict=True)]
    slowest = collectives.all_max(comm, np.array(rows))
    found = dict(zip(names, map(float, np.median(slowest, axis=0)), strict=True))
    hidden = statistics.median(c.hidden_fraction for c in counters)
    own = [-hidden, counters[-1].bytes_gathered, counters[-1].bytes_reduced, *usage, *memory]
    largest = collectives.all_max(comm, np.array(own, np.float64))
    tokens = outputs[-1].tokens
    waits = found["gather_wait_s"] + found["reduce_wait_s"]
    return {"tokens_per_s": tokens / found["step_s"], **found, "wait_share": waits / found["step_s"],
            "hidden_fraction": -float(largest[0]), "bytes_gathered": int(largest[1]), "bytes_reduced": int(largest[2]),
            "page_faults_per_step": float(largest[3]), "cpu_s": float(largest[4]), "peak_bytes": int(largest[5]),
            "peak_rss_bytes": int(largest[6]), "tokens": tokens, "loss": outputs[-1].loss, "grad_norm": outputs[-1].grad_norm}
