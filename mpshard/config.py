"""Configuration: every key, what derives from what, and which combinations are refused.

A key is one line below: its name, type and default as in any dataclass, what it is for, and the values it takes.
Everything else (type checks, ``--help``, the effective file) follows from that line by `mpshard.schema`. An unknown
key, a wrong type, an impossible value or a key that would have no effect is a `ConfigError` of one line: what, the
value, the remedy.

0 stands for "derived from the others" where a key says so; `load` returns the configuration with all of these filled
in (`resolve`), so the rest of the code never asks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mpshard import adapters, combinations, families
from mpshard.schema import Check, ConfigError, Schema, at_least, at_most, key, read_toml, show

__all__ = ["Config", "ConfigError", "describe", "flat", "load", "resolve", "to_toml", "validate"]

POSITIVE = at_least(1)
COUNT = at_least(0)
NONNEGATIVE = at_least(0)
ABOVE_ZERO = Check(lambda value: value > 0, "must be above 0")
FRACTION = Check(lambda value: 0 <= value < 1, "must be in [0, 1)")
FRACTIONS = Check(lambda values: all(0 <= value < 1 for value in values), "must all be in [0, 1)")
LLAMAS = "llama|mistral|qwen2|qwen3"  # the families that share `mpshard.models.llama`
NOT_EMPTY = Check(lambda value: bool(value) and "" not in (value if isinstance(value, tuple) else ()), "names nothing")


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: the shapes. Defaults are a small byte-level GPT."""

    init_from: str = key("", "Hugging Face model directory, or a run's, to start from: its config.json says the shapes; empty = none")
    arch: Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"] = key("gpt2", "family of the model")
    n_layers: int = key(6, "transformer blocks", POSITIVE)
    d_model: int = key(256, "width of the residual stream", POSITIVE)
    n_heads: int = key(8, "attention heads; must divide d_model", POSITIVE)
    n_kv_heads: int = key(0, "key/value heads; must divide n_heads; 0 = n_heads (gpt2 has no others)", COUNT)
    head_dim: int = key(0, "width of a head; 0 = d_model / n_heads", COUNT, needs=f"model.arch={LLAMAS}")
    d_ff: int = key(0, "width of the MLP; 0 = 4 d_model (gpt2), 8/3 d_model up to a multiple of 64 (all others)", COUNT)
    vocab_size: int = key(0, "rows of the embedding; 0 = the tokenizer's (256 for bytes)", COUNT)
    max_seq_len: int = key(0, "longest sequence, in tokens; 0 = data.seq_len", COUNT)
    tie_embeddings: bool = key(True, "the output projection is the embedding matrix")
    dropout: float = key(0.0, "probability of dropping an activation in training", FRACTION)
    norm_eps: float = key(1e-5, "epsilon of the layer or RMS norms", ABOVE_ZERO)
    activation: Literal["gelu_tanh", "gelu"] = key("gelu_tanh", "GELU by tanh, or exact", needs="model.arch=gpt2")
    rope_theta: float = key(10000.0, "base of the rotary frequencies", ABOVE_ZERO, needs=f"model.arch={LLAMAS}")
    rope_scaling: Literal["none", "linear", "llama3"] = key(
        "none", "how rotary frequencies are slowed for longer sequences", needs=f"model.arch={LLAMAS}"
    )
    rope_factor: float = key(1.0, "by how much", ABOVE_ZERO, needs="model.rope_scaling=linear|llama3")
    rope_low_freq_factor: float = key(1.0, "turns in rope_original_len under which all", ABOVE_ZERO, needs="model.rope_scaling=llama3")
    rope_high_freq_factor: float = key(4.0, "turns over which none", ABOVE_ZERO, needs="model.rope_scaling=llama3")
    rope_original_len: int = key(0, "positions before the scaling; 0 = max_seq_len", COUNT, needs="model.rope_scaling=llama3")
    sliding_window: int = key(0, "positions a query sees, at least data.seq_len; 0 = all", COUNT, needs="model.arch=mistral")
    attention_bias: bool = key(False, "biases in all attention projections (qwen2 has them in q, k, v)", needs="model.arch=llama|qwen3")
    mlp_bias: bool = key(False, "biases in the MLP projections", needs="model.arch=llama")


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: the tokens. Paths are relative to the working directory."""

    train: str | tuple[str, ...] = key(
        "stdlib", "text, .jsonl, .bin or .npy files: a path, a glob or a list; stdlib = Python's own library sources", NOT_EMPTY
    )
    eval: str | tuple[str, ...] = key(
        "auto", "as data.train; stdlib = its held-out tenth; auto = stdlib if data.train is, else none", NOT_EMPTY
    )
    format: Literal["text", "chat", "prompt_completion"] = key(
        "text", "text: any, .jsonl by its text field; chat, prompt_completion: JSONL of messages or prompt and completion, "
        "of which the assistant's part is learnt, packed"
    )
    tokenizer: str = key(
        "auto", "bytes (a token is a byte, documents end with byte 0), or a tokenizer.json or its directory; "
        "auto = that of model.init_from, else bytes", NOT_EMPTY
    )
    chat_template: str = key(
        "auto", "a Jinja file; chatml = <|im_start|>ROLE ... <|im_end|>; auto = that beside the tokenizer", NOT_EMPTY,
        needs="data.format=chat"
    )
    seq_len: int = key(256, "tokens of a sample", POSITIVE)
    shuffle: bool = key(True, "a new random order of samples each epoch; false = as they lie")
    token_dtype: Literal["auto", "uint16", "uint32"] = key(
        "auto", "type of the ids in .bin files; auto = uint16 if vocab_size fits, else uint32"
    )
    ignore_index: int = key(-100, "target that does not count in the loss", at_most(-1))


@dataclass(frozen=True)
class TrainConfig:
    """``[train]``: the loop."""

    steps: int = key(300, "optimizer steps", POSITIVE)
    global_batch_size: int = key(16, "sequences of a step, over all ranks", POSITIVE)
    micro_batch_size: int = key(4, "sequences a rank computes at a time", POSITIVE)
    seed: int = key(0, "of the initial weights, the sample order and dropout", COUNT, at_most(2**63 - 1))
    recompute: int | str = key(
        "pointwise", "what backward makes again: none; pointwise = norms and activation functions; block = whole blocks, of which "
        "only the input is kept; k = every k-th block", NOT_EMPTY
    )
    eval_every: int = key(0, "steps between evaluations; 0 = only at the end", COUNT)
    eval_ema: bool = key(False, "evaluate, and sample at the end, with the running average of the weights (optim.ema)")
    eval_batches: int = key(0, "micro-batches of an evaluation over all ranks, evenly spread; 0 = all", COUNT)
    log_every: int = key(1, "steps between lines of metrics.jsonl", POSITIVE)
    sample_tokens: int = key(0, "tokens of the sample printed at the end; 0 = none", COUNT)
    sample_prompt: str = key("", "what the sample continues; empty = the start of a document")


@dataclass(frozen=True)
class LoraConfig:
    """``[lora]``: small matrices that learn beside frozen large ones. Hu et al. 2021 (arXiv:2106.09685)."""

    rank: int = key(0, "rank of the adapters; 0 = none", COUNT)
    alpha: float = key(0.0, "what an adapter adds is multiplied with alpha / rank; 0 = 2 rank", NONNEGATIVE)
    targets: tuple[str, ...] = key((), "linear layers of the blocks that get one, as q_proj or *.mlp.*; empty = all")
    dropout: float = key(0.0, "probability of dropping an adapter's input in training", FRACTION)
    init_from: str = key("", "adapters to start from: a directory of PEFT's or a run; fixes rank, alpha, targets, model.init_from")


@dataclass(frozen=True)
class OptimConfig:
    """``[optim]``: the update, its schedule and clipping."""

    name: Literal["adamw", "sgd", "muon"] = key(
        "adamw", "adamw; sgd = with momentum; muon = orthogonal momentum for the blocks' matrices, adamw for the rest"
    )
    trainable: tuple[str, ...] = key((), "name patterns of the parameters that learn, as *.attn.*; empty = all")
    lr: float = key(1e-3, "peak learning rate", NONNEGATIVE)
    betas: tuple[float, float] = key((0.9, 0.95), "decay of the two moments", FRACTIONS, needs="optim.name=adamw|muon")
    eps: float = key(1e-8, "added to the root of the second moment", ABOVE_ZERO, needs="optim.name=adamw|muon")
    momentum: float = key(0.95, "share of the last update's direction that is kept", FRACTION, needs="optim.name=sgd|muon")
    muon_lr_factor: float = key(1.0, "rate of the matrices over optim.lr", ABOVE_ZERO, needs="optim.name=muon")
    muon_scale: Literal["moonshot", "jordan"] = key(
        "moonshot", "size of the matrices' update: 0.2 sqrt(larger side), as AdamW's; or sqrt(outputs / inputs), at least 1",
        needs="optim.name=muon"
    )
    moments: Literal["fp32", "bf16"] = key("fp32", "format of the moments; bf16 is rounded at random")
    ema: float = key(0.0, "decay of a running average of the weights, as 0.999; 0 = none", FRACTION)
    weight_decay: float = key(0.1, "decoupled decay a step, times the learning rate", NONNEGATIVE)
    no_decay: tuple[str, ...] = key((), "name patterns without decay, as *.bias; empty = all 1-D parameters")
    warmup_steps: int = key(0, "steps of linear warm-up from 0", COUNT)
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "learning rate after warm-up")
    min_lr_ratio: float = key(
        0.1, "last learning rate over the peak", NONNEGATIVE, at_most(1), needs="optim.schedule=cosine|linear"
    )
    clip_grad_norm: float = key(1.0, "largest global gradient norm; 0 = no clipping", NONNEGATIVE)


@dataclass(frozen=True)
class ShardConfig:
    """``[shard]``: who owns what, and how it travels."""

    strategy: Literal["full", "grad_op", "optim", "none", "hybrid"] = key(
        "full", "sharded are: full = weights, gradients, moments (ZeRO-3); grad_op = all but weights (ZeRO-2); optim = moments "
        "(ZeRO-1); none = nothing; hybrid = as full inside mesh.dp_shard ranks, replicated over the others"
    )
    prefetch: int = key(1, "units gathered ahead of the one that computes", COUNT)
    reshard_after_forward: bool | int = key(
        True, "free a unit after forward; false = keep it until its backward; k = keep it among k neighbouring ranks, 1/k on each",
        Check(lambda value: type(value) is bool or value >= 2, "must be true, false, or a number of ranks, at least 2"),
        needs="shard.strategy=full|hybrid"
    )
    unit: int | str | tuple[str, ...] = key(
        "block", 'what is gathered at once: "block", a number of blocks, a size such as "64MB", or a list of name patterns', NOT_EMPTY
    )
    accumulate: Literal["auto", "sharded", "unsharded"] = key(
        "auto", "reduce every micro-batch, or add them up in full gradients and reduce once a step"
    )
    deterministic: bool = key(False, "the same bits on 1, 2, 4, 8 ranks; needs a power of two, costs an ordered reduce")
    reduce: Literal["mpi", "alltoall"] = key("mpi", "reduce-scatter by MPI, or all-to-all and a sum in rank order")
    embedding: Literal["auto", "whole", "rows"] = key(
        "auto", "what travels of a table of embeddings: all of it, or the rows that a micro-batch's tokens name and their gradients; "
        "auto = rows where every rank has a node of its own; never of a table that a head reads"
    )
    transport: Literal["auto", "mpi", "shm", "staged"] = key(
        "auto", "how a unit travels: as messages, in memory that the ranks of a node share, or from a GPU through pinned memory"
    )
    progress: Literal["auto", "poll", "timer", "thread"] = key(
        "auto", "who drives MPI while the rank computes: poll = it does, between kernels; timer = also a thread, every 2 ms; "
        "thread = one that does nothing else"
    )
    offload: Literal["none", "optimizer", "activations", "all"] = key(
        "none", "what a GPU leaves in the host's memory until its next use: moments and masters, what forward keeps for backward",
        needs="run.device=auto|cupy"
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """``[precision]``: what weights and gradients are rounded to on their way. Masters, moments and sums are float32; on the
    CPU activations are, too, and products unless the processor multiplies bfloat16."""

    param: Literal["fp32", "bf16", "fp16"] = key("fp32", "format of gathered weights")
    gather: Literal["param", "fp8_e4m3"] = key("param", "what gathers send: as param, or 8 bits with a scale for each 128 weights")
    reduce: Literal["fp32", "bf16", "fp16"] = key("fp32", "format of gradients on their way; their sum is float32")
    products: Literal["param", "fp8"] = key(
        "param", "inputs of the blocks' products: as param, or 8 bits with a scale for each matrix; slower but on GPUs from Ada on"
    )
    tf32: bool = key(False, "fp32 products of a GPU by tensor cores, inputs rounded to 10 bits", needs="run.device=auto|cupy")


@dataclass(frozen=True)
class MeshConfig:
    """``[mesh]``: sizes of the groups of hybrid sharding."""

    dp_shard: int = key(0, "ranks among which a unit is gathered; 0 = those of a node", COUNT, needs="shard.strategy=hybrid")
    dp_replicate: int = key(0, "groups that hold the same; 0 = as many as there are", COUNT, needs="shard.strategy=hybrid")


@dataclass(frozen=True)
class CheckpointConfig:
    """``[checkpoint]``: what is kept of a run. One is always written at the end."""

    every: int = key(0, "steps between checkpoints; 0 = only at the end", COUNT)
    keep: int = key(2, "checkpoints that stay, the newest; 0 = all", COUNT)
    async_: bool = key(False, "write while training goes on, from a copy of the weights and the optimizer's state")
    weights: Literal["trained", "ema"] = key(
        "trained", "what model.safetensors holds: the weights, or their running average (optim.ema), with the weights themselves in "
        "optimizer.safetensors"
    )
    max_shard_bytes: int = key(50_000_000_000, "larger models are cut into several files; 0 = never", COUNT)
    dtype: Literal["fp32", "bf16"] = key(
        "fp32", "of the weights in model.safetensors; with bf16 the exact ones are kept in optimizer.safetensors"
    )


@dataclass(frozen=True)
class GuardConfig:
    """``[guard]``: what goes wrong without anything failing."""

    nan: Literal["stop", "skip", "rollback"] = key(
        "stop", "when loss or gradient norm is not finite: stop, skip the step, or go back to the last checkpoint and pass over "
                "the batches since"
    )
    spike: float = key(0.0, "loss or norm over its median by this many robust deviations is a spike; 0 = none is", NONNEGATIVE)
    on_spike: Literal["skip", "rollback", "stop"] = key("skip", "as guard.nan; only with guard.spike above 0")
    window: int = key(100, "good steps that a spike is measured against; as many in a row also clear the count of tries", at_least(8))
    tries: int = key(3, "interventions after which the run stops", POSITIVE)
    check_every: int = key(0, "steps between comparisons, by hash, of what ranks hold alike; 0 = never", COUNT)
    checksums: bool = key(False, "debugging: each gathered unit is compared with its owners' checksums, each slice with its own")


@dataclass(frozen=True)
class RunConfig:
    """``[run]``: where things go."""

    dir: str = key("", "run directory; empty = runs/NAME for NAME.toml")
    resume: str = key("", "auto = go on from the last checkpoint of run.dir, if it has one; DIR = from that checkpoint; "
                          "never = start over; empty = refuse if run.dir holds a run")
    device: Literal["auto", "numpy", "cupy"] = key("auto", "array library")
    kernels: Literal["auto", "numpy", "compiled", "cuda"] = key(
        "auto", "of a CPU: NumPy's; compiled ones; auto = compiled, where they were built. Of a GPU: cuda = the project's; "
        "auto = also NVIDIA's libraries, where they are installed"
    )
    cuda_aware: Literal["auto", "yes", "no"] = key(
        "auto", "whether MPI takes GPU memory; auto = two processes try it at start", needs="run.device=auto|cupy"
    )
    timeout: float = key(
        0.0, "seconds without progress after which a stalled job is ended; 0 = 20 of the longest steps, at least 60 s", NONNEGATIVE
    )
    trace: bool = key(False, "write trace.json: what every rank did when, for ui.perfetto.dev")
    trace_steps: int = key(5, "steps that the trace holds, the run's first", POSITIVE, needs="run.trace=true")


@dataclass(frozen=True)
class Config:
    """All sections. `load` fills it; `validate` checks what needs the number of ranks."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    optim: OptimConfig = OptimConfig()
    shard: ShardConfig = ShardConfig()
    precision: PrecisionConfig = PrecisionConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    run: RunConfig = RunConfig()


SCHEMA = Schema(Config)


def load(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply ``section.key=value`` overrides in order, and resolve derived values.

    The value of an override is TOML (``optim.betas=[0.9, 0.99]``) and, failing that, a bare string
    (``data.train=corpus/*.txt``). `path` None reads no file. Combinations are left to `validate`.

    Raises
    ------
    ConfigError : missing file, TOML syntax (with its line), unknown key, wrong type, value out of range; a model.init_from
        that is no model of a known family, or that a shape in the configuration contradicts.
    """
    settings: dict[str, Any] = {}
    name = "default"
    if path is not None:
        name = os.path.splitext(os.path.basename(path))[0]
        settings.update(SCHEMA.settings(read_toml(path)))
    settings.update(SCHEMA.parse_override(override) for override in overrides)
    settings = {full_name: SCHEMA.checked(full_name, value) for full_name, value in settings.items()}
    directory = settings.get("model.init_from", "")
    if directory and adapters.is_adapter(families.model_directory(directory)):  # the model is the one that it adapts
        settings["lora.init_from"] = settings.pop("model.init_from")
    if settings.get("lora.init_from"):
        _take_adapter(settings, settings["lora.init_from"])
    if settings.get("model.init_from"):
        _take_shapes(settings, settings["model.init_from"])

    sections: dict[str, dict[str, Any]] = {section: {} for section in SCHEMA.sections}
    for full_name, value in settings.items():
        field, _ = SCHEMA.lookup(full_name)
        sections[full_name.partition(".")[0]][field.name] = value
    defaults = Config()
    config = Config(**{s: dataclasses.replace(getattr(defaults, s), **values) for s, values in sections.items()})
    return resolve(config, name)


def _take_shapes(settings: dict[str, Any], directory: str) -> None:
    """Add the shapes that the directory's config.json says; one set by the user as well must be the same."""
    settings["model.init_from"] = directory = families.model_directory(directory)
    for name, value in families.read_model_keys(directory).items():
        full_name = f"model.{name}"
        given = settings.get(full_name)
        if given and given != value:  # 0 means "derived"
            raise ConfigError(f"{full_name}={show(given)} contradicts model.init_from={directory}, which has {show(value)}; remove it")
        settings[full_name] = SCHEMA.checked(full_name, value)


def _take_adapter(settings: dict[str, Any], directory: str) -> None:
    """Add what the directory's adapter_config.json says, likewise; and the model that it was made for, if none is named."""
    settings["lora.init_from"] = directory = families.model_directory(directory)
    keys = adapters.read_keys(directory)
    base = keys.pop("base")
    if not settings.get("model.init_from"):
        if not os.path.isdir(base):
            raise ConfigError(f"lora.init_from={directory} was made for {base or 'no named model'}, which is no directory here; "
                              "set model.init_from")
        settings["model.init_from"] = base
    for name, value in keys.items():
        full_name = f"lora.{name}"
        value = SCHEMA.checked(full_name, value)
        given = settings.get(full_name)
        if given and given != value:
            raise ConfigError(f"{full_name}={show(given)} contradicts lora.init_from={directory}, which has {show(value)}; remove it")
        settings[full_name] = value


def resolve(config: Config, name: str = "default") -> Config:
    """Fill in derived values (those left 0, empty or auto). `name` is the run's, for its directory. Idempotent."""
    m, d, r = config.model, config.data, config.run
    d_ff = 4 * m.d_model if m.arch == "gpt2" else -(-8 * m.d_model // (3 * 64)) * 64
    tokenizer = (m.init_from or "bytes") if d.tokenizer == "auto" else d.tokenizer
    tokens = 0 if m.vocab_size else 256 if tokenizer == "bytes" else families.tokenizer_vocab_size(tokenizer)
    model = dataclasses.replace(
        m,
        n_kv_heads=m.n_kv_heads or m.n_heads,
        d_ff=m.d_ff or d_ff,
        vocab_size=m.vocab_size or tokens,
        max_seq_len=m.max_seq_len or d.seq_len,
    )
    evaluation = ("stdlib" if d.train == "stdlib" else "none") if d.eval == "auto" else d.eval
    data = dataclasses.replace(d, eval=evaluation, tokenizer=tokenizer)
    run = dataclasses.replace(r, dir=r.dir or os.path.join("runs", name))
    lora = dataclasses.replace(config.lora, alpha=config.lora.alpha or 2.0 * config.lora.rank)
    return dataclasses.replace(config, model=model, data=data, run=run, lora=lora)


def flat(config: Config) -> dict[str, Any]:
    """``{"section.key": value}`` of every key, in the order of declaration."""
    return SCHEMA.flat(config)


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load` reads back to an equal one. Keys without effect are left out."""
    return SCHEMA.to_toml(config)


def describe() -> list[tuple[str, str, str, str]]:
    """(section.key, type, default, text) of every key, for ``--help``."""
    return SCHEMA.describe()


def validate(config: Config, world: int) -> None:
    """Refuse what cannot run on `world` ranks. `config` is resolved (`load` and `resolve` return such).

    Raises
    ------
    ConfigError : the first thing found wrong, types and ranges of every key included.
    """
    SCHEMA.validate(config)
    combinations.refuse(config, world)
