"""The Llama family: RMSNorm, rotary embedding, SwiGLU, grouped key/value heads, weights stored (out, in).

Touvron et al. 2023 (arXiv:2302.13971); grouped heads: Ainslie et al. 2023 (arXiv:2305.13245). Llama 1, 2, 3 and SmolLM2
as they are; Mistral, Qwen2 and Qwen3 are the same but for what `LlamaConfig.arch` says. Parameter names as the
`...ForCausalLM` classes of `transformers` save them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpshard.autograd import Parameter, Tape, Tensor, ops
from mpshard.device.base import Array
from mpshard.nn import Constant, MicroBatch, Model, Module, Normal


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama.

    n_kv_heads: 0 means n_heads; head_dim: 0 means d_model / n_heads; d_ff: 0 means 8/3 d_model rounded up to a multiple
    of 64. attention_bias: of all four projections.
    arch: "llama"; "mistral", with a sliding_window; "qwen2", with biases in the q, k, v projections; "qwen3", with an RMS
    norm over each query and each key head.
    sliding_window: how many positions back a query was trained to see, 0 for all; longer sequences are not for this model.
    rope_*: see `frequencies`.
    """

    vocab_size: int = 32000
    max_seq_len: int = 2048
    n_layers: int = 16
    d_model: int = 1024
    n_heads: int = 16
    n_kv_heads: int = 0
    d_ff: int = 0
    dropout: float = 0.0
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    arch: str = "llama"
    head_dim: int = 0
    sliding_window: int = 0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_len: int = 0

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def ff(self) -> int:
        return self.d_ff or -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads


def frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians a position of each pair of a head's elements: (e/2,) float64.

    Su et al. 2021 (arXiv:2104.09864), eq. 15. rope_scaling: "linear" slows all by `rope_factor` (Chen et al. 2023,
    arXiv:2306.15595); "llama3" only those that turn less than `rope_low_freq_factor` times within `rope_original_len`
    positions, not those that turn more than `rope_high_freq_factor` times, and the others in between.
    """
    e = config.head_width
    fast = config.rope_theta ** (-np.arange(0, e, 2, dtype=np.float64) / e)
    if config.rope_scaling == "none":
        return fast
    slow = fast / config.rope_factor
    if config.rope_scaling == "linear":
        return slow
    turns = (config.rope_original_len or config.max_seq_len) * fast / (2 * math.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    share = np.clip((turns - low) / (high - low), 0, 1)
    return share * fast + (1 - share) * slow


class Rotary:
    """Cosines and sines of every position's angles, made once per precision and grown on demand; shared by all blocks."""

    def __init__(self, config: LlamaConfig) -> None:
        self.frequencies = frequencies(config)
        self.tables: dict[object, tuple[Array, Array]] = {}

    def angles(self, tape: Tape, x: Array, batch: MicroBatch) -> tuple[Array, Array]:
        """cos, sin in the precision of x (b, t, d), at least float32: (t, e/2), or (b, t, e/2) if the batch has positions."""
        t, key = x.shape[1], np.promote_types(x.dtype, np.float32)
        needed = t if batch.cache is None else batch.cache.length + t
        if key not in self.tables or len(self.tables[key][0]) < needed:
            turns = np.outer(np.arange(1 << (needed - 1).bit_length()), self.frequencies)  # in float64
            self.tables[key] = tuple(tape.device.from_host(f(turns).astype(key)) for f in (np.cos, np.sin))
        cos, sin = self.tables[key]
        if batch.positions is None:
            return cos[:t], sin[:t]
        return tape.device.embedding(batch.positions, cos), tape.device.embedding(batch.positions, sin)


class Embedding(Module):
    name = "embed"
    backward_reads_weights = False

    def __init__(self, config: LlamaConfig) -> None:
        self.tokens = Parameter("model.embed_tokens.weight", (config.vocab_size, config.d_model), Normal(0.02))
        self.looked_up = self.tokens
        self.parameters = [self.tokens]
        self.dropout = config.dropout

    def forward(self, tape: Tape, x: None, batch: MicroBatch) -> Tensor:
        return ops.dropout(tape, ops.embedding(tape, batch.ids, self.tokens), self.dropout)


class Block(Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    replayable = True

    def __init__(self, config: LlamaConfig, index: int, rotary: Rotary) -> None:
        d, f, e, prefix = config.d_model, config.ff, config.head_width, f"model.layers.{index}"
        self.name, self.config, self.rotary = f"layers.{index}", config, rotary
        inner, into_residual = Normal(0.02), Normal(0.02 / math.sqrt(2 * config.n_layers))
        q, kv = config.n_heads * e, config.kv_heads * e

        def weights(names: list[str], sizes: list[int], columns: int, init: Normal, bias: bool) -> tuple[list[Parameter], list[Parameter]]:
            pairs = list(zip(names, sizes, strict=True))
            return ([Parameter(f"{prefix}.{n}.weight", (rows, columns), init) for n, rows in pairs],
                    [Parameter(f"{prefix}.{n}.bias", (rows,), Constant(0.0)) for n, rows in pairs] if bias else [])

        qkv, qkv_bias = weights(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [q, kv, kv], d, inner,
                                config.attention_bias or config.arch == "qwen2")
        out, out_bias = weights(["self_attn.o_proj"], [d], q, into_residual, config.attention_bias)
        gate_up, gate_up_bias = weights(["mlp.gate_proj", "mlp.up_proj"], [f, f], d, inner, config.mlp_bias)
        down, down_bias = weights(["mlp.down_proj"], [d], f, into_residual, config.mlp_bias)
        self.norm1 = Parameter(f"{prefix}.input_layernorm.weight", (d,), Constant(1.0))
        self.norm2 = Parameter(f"{prefix}.post_attention_layernorm.weight", (d,), Constant(1.0))
        heads = ["self_attn.q_norm", "self_attn.k_norm"] if config.arch == "qwen3" else []
        self.head_norms = [Parameter(f"{prefix}.{n}.weight", (e,), Constant(1.0)) for n in heads]
        self.parameters = [self.norm1, *qkv, *qkv_bias, *self.head_norms, *out, *out_bias, self.norm2, *gate_up, *gate_up_bias,
                           *down, *down_bias]
        # One product for q, k, v and one for gate, up: views over neighbours in storage, nothing is concatenated.
        self.qkv, self.gate_up = Parameter.fuse(f"{prefix}.qkv", qkv), Parameter.fuse(f"{prefix}.gate_up", gate_up)
        self.qkv_bias = Parameter.fuse(f"{prefix}.qkv.bias", qkv_bias) if qkv_bias else None
        self.gate_up_bias = Parameter.fuse(f"{prefix}.gate_up.bias", gate_up_bias) if gate_up_bias else None
        self.fused = [p for p in (self.qkv, self.gate_up, self.qkv_bias, self.gate_up_bias) if p is not None]
        self.out, self.down = out[0], down[0]
        self.out_bias, self.down_bias = out_bias[0] if out_bias else None, down_bias[0] if down_bias else None

    @property
    def lasting(self) -> list[Array]:  # type: ignore[override]
        return [table for pair in self.rotary.tables.values() for table in pair]

    def forward(self, tape: Tape, x: Tensor, batch: MicroBatch) -> Tensor:
        c = self.config
        h = ops.rms_norm(tape, x, self.norm1, c.norm_eps)
        qkv = ops.linear(tape, h, self.qkv, self.qkv_bias)  # (b, t, (h + 2k) e)
        if self.head_norms:
            of_queries, of_keys = self.head_norms
            qkv = ops.head_norm(tape, qkv, of_queries, of_keys, c.n_heads, c.kv_heads, c.norm_eps)
        angles, memory = self.rotary.angles(tape, x.data, batch), batch.memory_of(self.name)
        y = ops.attention(tape, qkv, c.n_heads, c.kv_heads, c.head_width ** -0.5, angles, batch.segments, memory)
        x = ops.residual(tape, x, ops.linear(tape, y, self.out, self.out_bias), c.dropout)
        h = ops.rms_norm(tape, x, self.norm2, c.norm_eps)
        h = ops.swiglu(tape, ops.linear(tape, h, self.gate_up, self.gate_up_bias))  # (b, t, f)
        return ops.residual(tape, x, ops.linear(tape, h, self.down, self.down_bias), c.dropout)


class Head(Module):
    name = "head"

    def __init__(self, config: LlamaConfig, tokens: Parameter) -> None:
        self.eps = config.norm_eps
        self.norm = Parameter("model.norm.weight", (config.d_model,), Constant(1.0))
        self.parameters = [self.norm]
        if config.tie_embeddings:
            self.table, self.borrowed = tokens, [tokens]
        else:
            self.table = Parameter("lm_head.weight", (config.vocab_size, config.d_model), Normal(0.02))
            self.parameters.append(self.table)

    def forward(self, tape: Tape, x: Tensor, batch: MicroBatch) -> Tensor:
        h = ops.rms_norm(tape, ops.last_position(tape, x) if batch.last_only else x, self.norm, self.eps)
        if batch.targets is None:
            return ops.logits(tape, h, self.table)
        return ops.cross_entropy(tape, h, self.table, batch.targets, batch.ignore_index)


def llama(config: LlamaConfig) -> Model:
    """The model as modules embed, layers.0 ... layers.(n-1), head."""
    embedding, rotary = Embedding(config), Rotary(config)
    blocks = [Block(config, index, rotary) for index in range(config.n_layers)]
    return Model([embedding, *blocks, Head(config, embedding.tokens)], config)
