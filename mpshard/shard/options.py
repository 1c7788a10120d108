"""How a model is sharded: the choices, what they come to, and which cannot be had together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpshard.config import ConfigError
from mpshard.nn.module import Model
from mpshard.shard.grouping import tables
from mpshard.shard.precision import Precision
from mpshard.shard.schedule import Stay

STRATEGIES = ("full", "grad_op", "optim", "none", "hybrid")


@dataclass(frozen=True)
class Options:
    """See `mpshard.shard` for what each means. Raises ConfigError for what is not known or cannot be combined."""

    strategy: str = "full"
    prefetch: int = 1
    reshard_after_forward: bool | int = True
    unit: str | int | Sequence[str] = "block"
    accumulate: str = "auto"
    deterministic: bool = False
    dp_shard: int = 0
    dp_replicate: int = 0
    reduce: str = "mpi"
    embedding: str = "auto"
    transport: str = "auto"
    progress: str = "auto"
    recompute: str | int = "pointwise"
    offload: str = "none"
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        for key, known in (("strategy", STRATEGIES), ("accumulate", ("auto", "sharded", "unsharded")),
                           ("reduce", ("mpi", "alltoall")), ("embedding", ("auto", "whole", "rows")),
                           ("transport", ("auto", "mpi", "shm", "staged")), ("progress", ("auto", "poll", "timer", "thread")),
                           ("offload", ("none", "optimizer", "activations", "all"))):
            if getattr(self, key) not in known:
                raise ConfigError(f'shard.{key}="{getattr(self, key)}" is not known; use {", ".join(known)}')
        if self.prefetch < 0:
            raise ConfigError(f"shard.prefetch={self.prefetch} must be 0 or more")
        if self.recompute not in ("none", "pointwise", "block") and not (isinstance(self.recompute, int) and self.recompute > 0):
            raise ConfigError(f'train.recompute="{self.recompute}" is not known; use "none", "pointwise", "block", '
                              "or a number k for every k-th block")
        if self.deterministic and self.accumulate == "unsharded":
            raise ConfigError("shard.accumulate=unsharded sums a rank's micro-batches first, in an order that depends on the number "
                              "of ranks; shard.deterministic=true needs sharded")
        if self.strategy != "hybrid" and (self.dp_shard or self.dp_replicate):
            raise ConfigError(f"mesh.dp_shard and mesh.dp_replicate have no effect with shard.strategy={self.strategy}; use hybrid")
        if self.strategy == "hybrid" and self.deterministic:
            raise ConfigError("shard.deterministic=true cannot be had with shard.strategy=hybrid, which sums group by group; use full")
        if self.strategy == "none" and self.transport == "shm":
            raise ConfigError("shard.transport=shm has no effect with shard.strategy=none; use auto")
        if self.embedding == "rows":
            for key, value, wrong, remedy in (
                    ("shard.strategy", self.strategy, "none", "whole: nothing is gathered"),
                    ("shard.transport", self.transport, "shm", "whole, or shard.transport=mpi: rows are messages"),
                    ("shard.deterministic", str(self.deterministic).lower(), "true", "whole: gradients of rows are summed in rank order"),
                    ("precision.gather", self.precision.gather, "fp8_e4m3", "whole: blocks with a scale are not rows")):
                if value == wrong:
                    raise ConfigError(f"shard.embedding=rows cannot be had with {key}={value}; use {remedy}")
        if type(self.reshard_after_forward) is int and self.reshard_after_forward < 2:
            raise ConfigError(f"shard.reshard_after_forward={self.reshard_after_forward}: a number of ranks must be at least 2; "
                              "use false to keep units on every rank")
        if self.keep_ranks and self.transport == "shm":
            raise ConfigError(f"shard.reshard_after_forward={self.keep_ranks} needs messages: use shard.transport=mpi or auto")
        if self.reshard_after_forward is not True and self.strategy not in ("full", "hybrid"):
            raise ConfigError(f"shard.reshard_after_forward={str(self.reshard_after_forward).lower()} has no effect with "
                              f"shard.strategy={self.strategy}, which keeps units through the step")

    @property
    def replicated(self) -> bool:
        """Every rank holds everything."""
        return self.strategy == "none"

    @property
    def keep_ranks(self) -> int:
        """How many ranks hold a unit together between forward and backward; 0 where that is all or every single one."""
        return self.reshard_after_forward if type(self.reshard_after_forward) is int else 0

    def sends_rows(self, messages: bool, apart: bool) -> bool:
        """Whether of a table of embeddings only rows travel. messages: whether units do as messages between CPUs; apart: whether
        these are of several nodes."""
        can = messages and not self.replicated and not self.deterministic and not self.precision.gather
        return can and (self.embedding == "rows" or (self.embedding == "auto" and apart))

    @property
    def wants_messages(self) -> bool:
        """Whether units cannot lie in shared memory, transport "auto" or not."""
        return self.transport in ("mpi", "staged") or bool(self.keep_ranks) or self.embedding == "rows"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether masters and moments live in the host's memory."""
        return self.offload in ("optimizer", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether what forward keeps for backward waits in the host's memory."""
        return self.offload in ("activations", "all")

    @property
    def stay(self) -> Stay:
        if self.strategy in ("grad_op", "optim", "none"):
            return Stay.STEP
        if self.keep_ranks:
            return Stay.GROUP
        return Stay.USE if self.reshard_after_forward else Stay.MICRO_BATCH

    @property
    def reduce_once(self) -> bool:
        """Whether micro-batches are added up before they travel."""
        if self.accumulate == "auto":
            return self.strategy in ("optim", "none") and not self.deterministic
        return self.accumulate == "unsharded"


def refuse(options: Options, model: Model, on_host: bool) -> None:
    """Raise ConfigError for what this model or this kind of device has not."""
    if options.embedding == "rows" and not tables(model):
        raise ConfigError("shard.embedding=rows has no effect: the head reads the table of embeddings whole; use auto")
    if on_host:
        if options.transport == "staged":
            raise ConfigError("shard.transport=staged has no effect with run.device=numpy; use auto, mpi or shm")
        return
    for key, value, wrong, remedy in (
            ("shard.transport", options.transport, ("shm",), "mpi or staged"),
            ("shard.embedding", options.embedding, ("rows",), "whole"),
            ("shard.progress", options.progress, ("thread", "timer"), "poll: the host thread is free while kernels run")):
        if value in wrong:
            raise ConfigError(f"{key}={value} cannot be had with run.device=cupy; use {remedy}")
    p = options.precision
    if p.reduce not in ("fp32", p.param):  # cuBLAS writes sums as float32 or as it reads
        raise ConfigError(f"precision.reduce={p.reduce} with precision.param={p.param} cannot be had with run.device=cupy; "
                          "use fp32 or the same")


def recomputed(model: Model, choice: str | int) -> frozenset[str]:
    """Names of the modules that keep only their input and run forward again in backward: blocks, never the first or last."""
    if choice in ("none", "pointwise"):
        return frozenset()
    every = 1 if choice == "block" else int(choice)
    return frozenset(module.name for module in model.modules[1:-1][::every])
