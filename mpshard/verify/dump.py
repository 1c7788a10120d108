"""One rank's part of a run that is verified: some steps of the user's own configuration, and what came of them on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpshard.comm.agree import agree
from mpshard.config import Config
from mpshard.data import open_data
from mpshard.device.blas import set_blas_threads
from mpshard.optim import learning_rate
from mpshard.train import build_model
from mpshard.verify.compare import NUMBERS

if TYPE_CHECKING:
    from mpi4py import MPI


def dump(config: Config, comm: MPI.Comm, folder: Path, steps: int, threads: int) -> None:
    """Train `steps` steps from the first sample on and write this rank's weights, and on rank 0 losses and norms. Collective.

    threads: of BLAS, the same for all runs that are compared: a sum in another order has other last bits.
    """
    o, t = config.optim, config.train
    data = agree(comm, lambda: open_data(config))
    sharded, optim = build_model(config, comm)
    set_blas_threads(threads)
    losses, norms = [], []
    for step in range(steps):
        batch = data.train.step_batch(step * t.global_batch_size, t.global_batch_size, t.micro_batch_size, comm.rank, comm.size)
        output = sharded.step(batch)
        optim.lr = learning_rate(step, peak=o.lr, steps=t.steps, warmup=o.warmup_steps, schedule=o.schedule, floor=o.min_lr_ratio)
        optim.step(output)
        losses.append(float(output.loss))
        norms.append(float(output.grad_norm))
    pieces = {f"{s.name}|{s.start}|{s.stop}": sharded.device.to_host(unit.shard[s.slice])
              for unit in sharded.units.values() for s in unit.owned}

    def write() -> None:
        np.savez(folder / f"rank-{comm.rank}.npz", **pieces)
        if comm.rank == 0:
            shapes = {place.name: place.shape for unit in sharded.units.values() for place in unit.layout.placements}
            (folder / NUMBERS).write_text(json.dumps({"losses": losses, "norms": norms, "shapes": shapes}))

    agree(comm, write)
    sharded.close()
