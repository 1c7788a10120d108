"""Values that are each possible but not together: what is refused before anything is built. See `mpshard.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpshard.schema import ConfigError, show

if TYPE_CHECKING:
    from mpshard.config import Config, DataConfig, ModelConfig


def refuse(config: Config, world: int) -> None:
    """Raise ConfigError for the first combination of a resolved configuration that cannot run on `world` ranks."""
    _refuse_model(config.model, config.data)
    _refuse_training(config, world)
    _refuse_adapters(config)


def _refuse_model(m: ModelConfig, d: DataConfig) -> None:
    head_width = m.head_dim or m.d_model // m.n_heads
    if m.d_model % m.n_heads and not m.head_dim:
        nearest = _nearest_multiple(m.d_model, m.n_heads)
        raise ConfigError(
            f"model.n_heads={m.n_heads} does not divide model.d_model={m.d_model}; nearest d_model: {nearest}"
        )
    if m.arch == "gpt2" and m.n_kv_heads != m.n_heads:
        raise ConfigError(
            f"model.n_kv_heads={m.n_kv_heads} with model.n_heads={m.n_heads}: gpt2 has no grouped heads; "
            f"remove it or use model.arch=llama"
        )
    if m.n_heads % m.n_kv_heads:
        divisors = ", ".join(str(n) for n in range(1, m.n_heads + 1) if m.n_heads % n == 0)
        raise ConfigError(f"model.n_kv_heads={m.n_kv_heads} does not divide model.n_heads={m.n_heads}; use {divisors}")
    if m.arch != "gpt2" and head_width % 2:
        if m.head_dim:
            raise ConfigError(f"model.head_dim={m.head_dim} is odd; rotary embedding needs an even one")
        raise ConfigError(
            f"model.d_model / model.n_heads = {m.d_model} / {m.n_heads} = {head_width} is odd; "
            f"rotary embedding needs an even head width: change either"
        )
    if 0 < m.sliding_window < d.seq_len:
        raise ConfigError(
            f"data.seq_len={d.seq_len} is over model.sliding_window={m.sliding_window}: attention over a window is not "
            f"supported; lower data.seq_len, with which the window makes no difference"
        )
    if d.seq_len > m.max_seq_len:
        raise ConfigError(
            f"data.seq_len={d.seq_len} is over model.max_seq_len={m.max_seq_len}; raise the latter or remove it"
        )


def _refuse_training(config: Config, world: int) -> None:
    t, d, o = config.train, config.data, config.optim
    unit = t.micro_batch_size * world
    if t.global_batch_size % unit:
        raise ConfigError(
            f"train.global_batch_size={t.global_batch_size} is not a multiple of train.micro_batch_size x ranks = "
            f"{t.micro_batch_size} x {world} = {unit}; nearest: {_nearest_multiple(t.global_batch_size, unit)}"
        )
    g = config.guard
    if g.on_spike != "skip" and not g.spike:
        raise ConfigError(f"guard.on_spike={g.on_spike} has no effect with guard.spike=0; set guard.spike or remove it")
    for name in ("nan", "on_spike"):
        if getattr(g, name) == "rollback" and not config.checkpoint.every:
            raise ConfigError(f"guard.{name}=rollback needs checkpoints to go back to: set checkpoint.every")
    if g.checksums and config.shard.embedding == "rows":
        raise ConfigError("shard.embedding=rows has no effect with guard.checksums=true, which looks at every unit whole; use auto")
    if o.warmup_steps > t.steps:
        raise ConfigError(f"optim.warmup_steps={o.warmup_steps} is over train.steps={t.steps}; lower it")
    for name, used in (("train.eval_ema=true", t.eval_ema), ("checkpoint.weights=ema", config.checkpoint.weights == "ema")):
        if used and not o.ema:
            raise ConfigError(f"{name} needs a running average: set optim.ema, as optim.ema=0.999")
    if d.eval == "none":
        for name, value in (("eval_every", t.eval_every), ("eval_batches", t.eval_batches)):
            if value:
                raise ConfigError(f"train.{name}={value} but data.eval is none; set data.eval or remove it")
    if d.format != "text" and "stdlib" in (d.train, d.eval, *d.train, *d.eval):
        raise ConfigError(f"data.format={d.format} needs JSONL files in data.train and data.eval, not stdlib")
    if t.sample_prompt and not t.sample_tokens:
        raise ConfigError(f"train.sample_prompt={show(t.sample_prompt)} needs train.sample_tokens above 0")


def _nearest_multiple(value: int, unit: int) -> int:
    return max(1, (value + unit // 2) // unit) * unit


def _refuse_adapters(config: Config) -> None:
    a = config.lora
    if not a.rank:
        for name, value in (("alpha", a.alpha), ("targets", a.targets), ("dropout", a.dropout)):
            if value:
                raise ConfigError(f"lora.{name}={show(value)} has no effect with lora.rank=0; set lora.rank or remove it")
        return
    if not config.model.init_from:
        raise ConfigError(f"lora.rank={a.rank} adapts a trained model: set model.init_from")
    if config.optim.trainable:
        raise ConfigError(f"optim.trainable={show(config.optim.trainable)} has no effect with lora.rank={a.rank}: adapters alone learn")
