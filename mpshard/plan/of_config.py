"""Plans of a configuration, as `mpshard plan` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpshard import config as configuration
from mpshard import models
from mpshard.config import Config, ConfigError
from mpshard.device.base import Kind
from mpshard.nn import Model
from mpshard.plan.activations import activation_bytes
from mpshard.plan.costs import Plan, plan, topology
from mpshard.shard.options import Options
from mpshard.shard.precision import Precision

MOST_RANKS = 1 << 16  # where the search for enough ranks ends


def options_of(config: Config) -> Options:
    """How `config` shards."""
    s = config.shard
    return Options(s.strategy, s.prefetch, s.reshard_after_forward, s.unit, s.accumulate, s.deterministic, config.mesh.dp_shard,
                   config.mesh.dp_replicate, s.reduce, s.embedding, s.transport, s.progress,
                   config.train.recompute, s.offload, Precision.of(config.precision))


def plan_of(config: Config, ranks: int, ranks_on_node: int = 0, rank: int = 0) -> Plan:
    """The plan of a resolved configuration on `ranks` ranks. ConfigError if it cannot run on so many."""
    configuration.validate(config, ranks)
    t, model = config.train, models.model_of(config)
    tokens = 0 if config.guard.checksums else t.micro_batch_size * config.data.seq_len  # units that are looked at travel whole
    return plan(model, options_of(config), ranks, t.global_batch_size // (t.micro_batch_size * ranks), rank=rank,
                ranks_on_node=ranks_on_node, tokens=tokens, evaluates=config.data.eval != "none",
                on_host=_on_host(config), **_optimizer(config, model))


def _on_host(config: Config) -> bool:
    """Whether to plan for a CPU: unless a GPU is asked for, since what "auto" will find elsewhere is not known here."""
    return config.run.device != "cupy"


def _optimizer(config: Config, model: Model) -> dict[str, Any]:
    """What the optimizer keeps, as `plan` asks for it."""
    o = config.optim
    return {"moments": {"adamw": 2, "muon": 2, "sgd": 1 if o.momentum else 0}[o.name], "moment_dtype": "float32" if o.moments == "fp32"
            else "uint16", "single": model.matrices if o.name == "muon" else (), "average": o.ema > 0}


def plans(config: Config, ranks: Sequence[int], device_bytes: int = 0, ranks_on_node: int = 0) -> dict[str, Any]:
    """What `mpshard plan --json` prints: {"parameters", "plans": one for each of `ranks`, "fewest_ranks"}.

    A number of ranks that the configuration cannot run on has a "problem" instead of figures. device_bytes: what a rank
    has; 0: not known, and nothing is said of what fits.
    """
    model = models.model_of(config)
    rows = [_row(config, n, device_bytes, ranks_on_node) for n in ranks]
    found = {"arch": config.model.arch, "parameters": model.size, "strategy": config.shard.strategy, "plans": rows}
    return found | ({"device_bytes": device_bytes, "fewest_ranks": fewest_ranks(config, device_bytes)} if device_bytes else {})


def fewest_ranks(config: Config, device_bytes: int) -> int | None:
    """The smallest power of two of ranks on which the estimated need of each fits `device_bytes`, None if none does.

    The batch is taken to be one micro-batch a rank.
    """
    model, options, ranks = models.model_of(config), options_of(config), 1
    on_host = _on_host(config)
    activations = activation_bytes(model, options, config.train.micro_batch_size * config.data.seq_len, on_host)
    while ranks <= MOST_RANKS:
        if plan(model, options, ranks, on_host=on_host, **_optimizer(config, model)).total + activations <= device_bytes:
            return ranks
        ranks *= 2
    return None


def _row(config: Config, ranks: int, device_bytes: int, ranks_on_node: int) -> dict[str, Any]:
    try:
        made = plan_of(config, ranks, min(ranks_on_node, ranks))
    except ConfigError as error:
        return {"ranks": ranks, "problem": str(error)}
    options = options_of(config)
    tokens = config.train.micro_batch_size * config.data.seq_len
    activations = activation_bytes(models.model_of(config), options, tokens, _on_host(config))
    row = {"ranks": ranks, "micro_batches": config.train.global_batch_size // (config.train.micro_batch_size * ranks),
           "transport": "shm" if _on_host(config) and topology(options, ranks, min(ranks_on_node, ranks)).shares_memory else "mpi",
           "bytes": {kind.value: made.bytes[kind] for kind in Kind if kind in made.bytes}, "total_bytes": made.total,
           "activation_bytes_estimated": activations, "gathers": made.gathers, "reduces": made.reduces,
           "bytes_gathered": made.bytes_gathered, "bytes_reduced": made.bytes_reduced}
    return row | ({"fits": made.total + activations <= device_bytes} if device_bytes else {})
