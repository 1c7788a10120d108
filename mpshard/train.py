"""From a configuration to what trains: data, a sharded model, its optimizer; evaluating and sampling it.

The loop itself is `mpshard.loop`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpshard import models
from mpshard.checkpoint import check_weights, load_weights, open_on_all, publish
from mpshard.comm.agree import agree, on_root
from mpshard.config import Config
from mpshard.data import Batches, Data, PackedBatches, open_data
from mpshard.device.blas import blas_info, set_blas_threads
from mpshard.observe.console import Console
from mpshard.optim import Optimizer, from_config
from mpshard.sample import Sampling, generate
from mpshard.shard import Sharded, shard
from mpshard.shard.precision import Precision

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class Job:
    """A run, built: what `train` needs, each piece usable by itself."""

    config: Config
    data: Data
    sharded: Sharded
    optim: Optimizer
    console: Console


def build_sharded(config: Config, comm: MPI.Comm) -> Sharded:
    """The model that `config` says, cut over the ranks of `comm`, with first weights or those of model.init_from.

    Raises ConfigError, on every rank, if model.init_from (or lora.init_from) does not hold the weights of such a model.
    """
    c, model = config, models.model_of(config)
    stores = [open_on_all(comm, publish.find(Path(path))) for path in (c.model.init_from, c.lora.init_from) if path]
    for store in stores:
        on_root(comm, partial(check_weights, store, model))  # before any memory is taken
    sharded = shard(
        model, comm, strategy=c.shard.strategy, prefetch=c.shard.prefetch, reshard_after_forward=c.shard.reshard_after_forward,
        unit=c.shard.unit, accumulate=c.shard.accumulate, deterministic=c.shard.deterministic, dp_shard=c.mesh.dp_shard,
        dp_replicate=c.mesh.dp_replicate, reduce=c.shard.reduce, embedding=c.shard.embedding, transport=c.shard.transport,
        progress=c.shard.progress, recompute=c.train.recompute, offload=c.shard.offload, device=c.run.device, seed=c.train.seed,
        ignore_index=c.data.ignore_index, cuda_aware=c.run.cuda_aware, kernels=c.run.kernels,
        precision=Precision.of(c.precision))
    for store in stores:
        load_weights(sharded, store)
    set_blas_threads(sharded.mesh.cores)
    return sharded


def build_model(config: Config, comm: MPI.Comm) -> tuple[Sharded, Optimizer]:
    """`build_sharded` and its optimizer; no data needed."""
    sharded = build_sharded(config, comm)
    return sharded, from_config(config.optim, sharded)


def build(config: Config, comm: MPI.Comm) -> Job:
    """Open the data, make the model's shapes, cut it over the ranks of `comm`. `config` is resolved and valid.

    Raises ConfigError, the same on every rank, for data that cannot be opened.
    """
    c, console = config, Console(speaks=comm.rank == 0)
    data = agree(comm, lambda: open_data(config))
    for batches in (data.train, data.eval):
        if batches is not None and batches.about:
            console.say(batches.about)
    sharded, optim = build_model(config, comm)
    console.say(f"{c.model.arch}, {sharded.model.size:,} parameters in {len(sharded.units)} units; ranks: {comm.size}, "
                f"BLAS threads of each: {blas_info().threads}, {sharded.device.about}; "
                f"transport {sharded.transport.name}, progress by {sharded.progress.name}")
    return Job(config, data, sharded, optim, console)


def weights_to_show(job: Job) -> AbstractContextManager[None]:
    """The weights to evaluate and sample with, inside: those of the last step, or their running average."""
    average = job.optim.average
    return average.in_place() if job.config.train.eval_ema and average is not None else nullcontext()


def evaluate(sharded: Sharded, batches: Batches | PackedBatches, micro_batch_size: int, limit: int = 0) -> tuple[float, int]:
    """Mean loss over all valid tokens (nats) and their number; `limit` micro-batches over all ranks, 0 for all."""
    mesh = sharded.mesh
    return sharded.evaluate(batch.first() for batch in batches.eval_batches(mesh.rank, mesh.world, micro_batch_size, limit))


def sample_text(job: Job) -> str:
    """A continuation of train.sample_prompt (or of a document's beginning), as text."""
    c, tokenizer = job.config, job.data.tokenizer
    prompt = [int(i) for i in tokenizer.encode(c.train.sample_prompt)] or [tokenizer.separator]
    ids = generate(job.sharded, prompt, c.train.sample_tokens, Sampling(temperature=0.8, seed=c.train.seed))
    return f"a sample:\n{tokenizer.decode(ids)}"
