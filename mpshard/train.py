"""From a configuration to a trained model: build, step, log, evaluate."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpshard import models
from mpshard.checkpoint import check_weights, load_weights, open_on_all, publish
from mpshard.checkpoint.resume import is_run, resume, set_aside
from mpshard.checkpoint.saver import Saver
from mpshard.comm import collectives
from mpshard.comm.agree import agree, on_root
from mpshard.config import Config, ConfigError, flat, to_toml
from mpshard.data import Batches, Data, PackedBatches, open_data
from mpshard.device.blas import blas_info, set_blas_threads
from mpshard.observe.console import Console
from mpshard.observe.metrics import MetricsFile, cut_after
from mpshard.optim import AdamW, learning_rate
from mpshard.sample import Sampling, generate
from mpshard.shard import Sharded, StepOutput, shard
from mpshard.shard.precision import Precision
from mpshard.tracing import Tracing

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class Job:
    """A run, built: what `train` needs, each piece usable by itself."""

    config: Config
    data: Data
    sharded: Sharded
    optim: AdamW
    console: Console


def build_sharded(config: Config, comm: MPI.Comm) -> Sharded:
    """The model that `config` says, cut over the ranks of `comm`, with first weights or those of model.init_from.

    Raises ConfigError, on every rank, if model.init_from does not hold the weights of such a model.
    """
    c, model, weights = config, models.from_config(config.model), None
    if c.model.init_from:
        weights = open_on_all(comm, publish.find(Path(c.model.init_from)))
        on_root(comm, lambda: check_weights(weights, model))  # before any memory is taken
    sharded = shard(
        model, comm, strategy=c.shard.strategy, prefetch=c.shard.prefetch, reshard_after_forward=c.shard.reshard_after_forward,
        unit=c.shard.unit, accumulate=c.shard.accumulate, deterministic=c.shard.deterministic, dp_shard=c.mesh.dp_shard,
        dp_replicate=c.mesh.dp_replicate, reduce=c.shard.reduce, transport=c.shard.transport, progress=c.shard.progress,
        recompute=c.train.recompute, device=c.run.device, seed=c.train.seed, ignore_index=c.data.ignore_index,
        precision=Precision(c.precision.param, c.precision.gather.removeprefix("param"), c.precision.reduce))
    if weights is not None:
        load_weights(sharded, weights)
    set_blas_threads(sharded.mesh.cores)
    return sharded


def build_model(config: Config, comm: MPI.Comm) -> tuple[Sharded, AdamW]:
    """`build_sharded` and its optimizer; no data needed."""
    c, sharded = config, build_sharded(config, comm)
    optim = AdamW(
        sharded, lr=c.optim.lr, betas=c.optim.betas, eps=c.optim.eps, weight_decay=c.optim.weight_decay,
        clip_grad_norm=c.optim.clip_grad_norm, no_decay=c.optim.no_decay or None)
    return sharded, optim


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
                f"BLAS threads of each: {blas_info().threads}, {sharded.device.name}; "
                f"transport {sharded.transport.name}, progress by {sharded.progress.name}")
    return Job(config, data, sharded, optim, console)


def run(config: Config, comm: MPI.Comm) -> float | None:
    """Build and train; a run directory that holds a run already is refused before anything else happens."""
    on_root(comm, lambda: _may_run(config))
    return train(build(config, comm))


def train(job: Job) -> float | None:
    """Run all steps; leave metrics.jsonl, config.toml and checkpoints in the run directory.

    Goes on from a checkpoint if run.resume says so. Returns the last evaluation loss of this call.
    """
    c, sharded, optim, console = job.config, job.sharded, job.optim, job.console
    comm, folder, size = sharded.mesh.comm, Path(c.run.dir), c.train.global_batch_size
    begun = resume(c.run.resume, folder, sharded, optim, flat(c), console.say)
    path = on_root(comm, lambda: _open_run(c, begun.step))
    metrics = agree(comm, lambda: MetricsFile(path if comm.rank == 0 else None))
    saver = Saver(folder / "checkpoints", sharded, optim, c.checkpoint, flat(c), job.data.tokenizer.files(),
                  job.data.tokenizer.special_ids)
    tracing = Tracing(sharded, folder / "trace.json", c.run.trace_steps) if c.run.trace else None
    evaluation: float | None = None
    console.start(c.train.steps, begun.step)
    for step in range(begun.step, c.train.steps):
        position = begun.position + (step - begun.step) * size  # in samples, over all ranks
        start = time.perf_counter()
        batch = job.data.train.step_batch(position, size, c.train.micro_batch_size, comm.rank, comm.size)
        output = sharded.step(batch)
        optim.lr = learning_rate(step, peak=c.optim.lr, steps=c.train.steps, warmup=c.optim.warmup_steps,
                                 schedule=c.optim.schedule, floor=c.optim.min_lr_ratio)
        updating = time.perf_counter()
        optim.step(output)
        end = time.perf_counter()
        if tracing is not None:
            tracing.done(step + 1, start, updating, end)
        record = step_record(job, step + 1, output, end - start, end - updating)
        if (step + 1) % c.train.log_every == 0 or step + 1 == c.train.steps:
            metrics.write(record)
        console.advance(step + 1, output.loss, record["tokens_per_s"])
        due = c.train.eval_every and (step + 1) % c.train.eval_every == 0
        if job.data.eval is not None and (due or step + 1 == c.train.steps):
            evaluation, _ = evaluate(sharded, job.data.eval, c.train.micro_batch_size, c.train.eval_batches)
            metrics.write({"step": step + 1, "eval_loss": evaluation})
            console.say(f"step {step + 1}/{c.train.steps}  evaluation loss {evaluation:.4f}")
        saver.poll()
        if saver.due(step + 1, c.train.steps):
            saver.save(step + 1, position + size)
    saver.wait()
    console.stop()
    metrics.close()
    if tracing is not None:
        tracing.close()
    if c.train.sample_tokens:
        console.say(_sample(job))
    return evaluation


def evaluate(sharded: Sharded, batches: Batches | PackedBatches, micro_batch_size: int, limit: int = 0) -> tuple[float, int]:
    """Mean loss over all valid tokens (nats) and their number; `limit` micro-batches over all ranks, 0 for all."""
    mesh = sharded.mesh
    return sharded.evaluate(batch.first() for batch in batches.eval_batches(mesh.rank, mesh.world, micro_batch_size, limit))


def step_record(job: Job, step: int, output: StepOutput, step_s: float, optim_s: float) -> dict[str, float]:
    """The metrics line of a step: times and waits are the slowest rank's, bytes one rank's largest."""
    mesh, counters = job.sharded.mesh, asdict(output.counters)
    names = ["forward_s", "backward_s", "gather_wait_s", "reduce_wait_s", "bytes_gathered", "bytes_reduced"]
    own = [*(counters[name] for name in names), step_s, optim_s, job.sharded.device.memory.peak(),
           -output.counters.hidden_fraction]
    largest = collectives.all_max(mesh.comm, np.array(own, np.float64))
    slowest = dict(zip([*names, "step_s", "optim_s", "peak_bytes", "hidden_fraction"], map(float, largest), strict=True))
    record = {"step": step, "loss": output.loss, "grad_norm": output.grad_norm, "lr": job.optim.lr, "tokens": output.tokens}
    record |= {name: slowest[name] for name in ("step_s",)} | {"tokens_per_s": output.tokens / slowest["step_s"]}
    record |= {name: slowest[name] for name in ("forward_s", "backward_s", "optim_s", "gather_wait_s", "reduce_wait_s")}
    record |= {"hidden_fraction": -slowest["hidden_fraction"]}
    record |= {name: int(slowest[name]) for name in ("bytes_gathered", "bytes_reduced", "peak_bytes")}
    return record | {"world_size": mesh.world}


def _may_run(config: Config) -> None:
    """Raise ConfigError if the run directory cannot be written, or holds a run and nobody said what to do about it."""
    folder = Path(config.run.dir)
    if not config.run.resume and is_run(folder):
        raise ConfigError(f"run.dir={config.run.dir} holds a run already: run.resume=auto goes on with it, "
                          "run.resume=never starts over, another run.dir leaves it alone")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir} cannot be written ({error.strerror}); choose another") from None


def _open_run(config: Config, step: int) -> Path:
    """Make the run directory, write down what is effective, cut metrics.jsonl to what was done by `step`; its path."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.run.resume == "never":
        set_aside(folder)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    cut_after(folder / "metrics.jsonl", step)
    return folder / "metrics.jsonl"


def _sample(job: Job) -> str:
    """A continuation of train.sample_prompt (or of a document's beginning), as text."""
    c, tokenizer = job.config, job.data.tokenizer
    prompt = [int(i) for i in tokenizer.encode(c.train.sample_prompt)] or [tokenizer.separator]
    ids = generate(job.sharded, prompt, c.train.sample_tokens, Sampling(temperature=0.8, seed=c.train.seed))
    return f"a sample:\n{tokenizer.decode(ids)}"
