"""What a step costs beside its arithmetic: CPU time of the same instructions on a model of almost no size.

An upper bound of what Python takes: the kernels of that model take something, too, and so do waits for other ranks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mpshard.comm import collectives
from mpshard.config import Config, ConfigError
from mpshard.train import build_model

if TYPE_CHECKING:
    from mpi4py import MPI

WIDTH, POSITIONS = 16, 2  # one head; compiled attention wants multiples of 16
WARMUP = 5  # steps: blocks that will be replayed are recorded in the second


def shrunk(config: Config) -> Config:
    """The same layers, shards and micro-batches, and next to nothing in them."""
    if config.model.init_from:
        raise ConfigError(f"--overhead wants the model's shapes in [model], not model.init_from={config.model.init_from}")
    model = replace(config.model, d_model=WIDTH, n_heads=1, n_kv_heads=0, head_dim=0, d_ff=WIDTH, vocab_size=WIDTH,
                    max_seq_len=POSITIONS, sliding_window=0)
    return replace(config, model=model, data=replace(config.data, seq_len=POSITIONS))


def measure(config: Config, comm: MPI.Comm, steps: int) -> float:
    """Seconds of CPU time a step of the shrunk model, of the slowest rank the median. Collective."""
    sharded, optim = build_model(shrunk(config), comm)
    micro = config.train.micro_batch_size
    tokens = np.zeros((config.train.global_batch_size // (micro * comm.size), micro, POSITIONS), np.int64)
    taken = []
    for step in range(WARMUP + steps):
        start = time.process_time()
        optim.step(sharded.step((tokens, tokens)))
        if step >= WARMUP:
            taken.append(time.process_time() - start)
    sharded.close()
    return float(collectives.all_max(comm, np.array([statistics.median(taken)]))[0])
