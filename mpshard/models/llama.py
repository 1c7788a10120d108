"""The Llama family: RMSNorm, rotary embedding, SwiGLU, grouped key/value heads, weights stored (out, in).

Touvron et al. 2023 (arXiv:2302.13971); grouped heads: Ainslie et al. 2023 (arXiv:2305.13245). Parameter names as
`transformers.LlamaForCausalLM` saves them.
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
    """Sizes of a Llama. n_kv_heads: 0 means n_heads; d_ff: 0 means 8/3 d_model rounded up to a multiple of 64."""

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

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def ff(self) -> int:
        return self.d_ff or -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads


class Rotary:
    """Cosines and sines of every position's angles, made once per device and length; shared by all blocks."""

    def __init__(self, config: LlamaConfig) -> None:
        e = config.head_width
        self.frequencies = config.rope_theta ** (-np.arange(0, e, 2, dtype=np.float64) / e)  # (e/2,)
        self.tables: dict[tuple[int, object], tuple[Array, Array]] = {}

    def angles(self, tape: Tape, x: Array) -> tuple[Array, Array]:
        """cos, sin (t, e/2) in the precision of x (b, t, d). Angles are made in float64."""
        key = (x.shape[1], x.dtype)
        if key not in self.tables:
            turns = np.outer(np.arange(x.shape[1]), self.frequencies)
            self.tables[key] = tuple(tape.device.from_host(f(turns).astype(x.dtype)) for f in (np.cos, np.sin))
        return self.tables[key]


class Embedding(Module):
    name = "embed"
    backward_reads_weights = False

    def __init__(self, config: LlamaConfig) -> None:
        self.tokens = Parameter("model.embed_tokens.weight", (config.vocab_size, config.d_model), Normal(0.02))
        self.parameters = [self.tokens]
        self.dropout = config.dropout

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        return ops.dropout(tape, ops.embedding(tape, batch.ids, self.tokens), self.dropout)


class Block(Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, config: LlamaConfig, index: int, rotary: Rotary) -> None:
        d, f, e, prefix = config.d_model, config.ff, config.head_width, f"model.layers.{index}"
        self.name, self.config, self.rotary = f"layers.{index}", config, rotary
        inner, into_residual = Normal(0.02), Normal(0.02 / math.sqrt(2 * config.n_layers))
        kv = config.kv_heads * e

        def weights(names: list[str], sizes: list[int], columns: int, init: Normal, bias: bool) -> tuple[list[Parameter], list[Parameter]]:
            pairs = list(zip(names, sizes, strict=True))
            return ([Parameter(f"{prefix}.{n}.weight", (rows, columns), init) for n, rows in pairs],
                    [Parameter(f"{prefix}.{n}.bias", (rows,), Constant(0.0)) for n, rows in pairs] if bias else [])

        qkv, qkv_bias = weights(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [d, kv, kv], d, inner, config.attention_bias)
        out, out_bias = weights(["self_attn.o_proj"], [d], d, into_residual, config.attention_bias)
        gate_up, gate_up_bias = weights(["mlp.gate_proj", "mlp.up_proj"], [f, f], d, inner, config.mlp_bias)
        down, down_bias = weights(["mlp.down_proj"], [d], f, into_residual, config.mlp_bias)
        self.norm1 = Parameter(f"{prefix}.input_layernorm.weight", (d,), Constant(1.0))
        self.norm2 = Parameter(f"{prefix}.post_attention_layernorm.weight", (d,), Constant(1.0))
        self.parameters = [self.norm1, *qkv, *qkv_bias, *out, *out_bias, self.norm2, *gate_up, *gate_up_bias, *down, *down_bias]
        # One product for q, k, v and one for gate, up: views over neighbours in storage, nothing is concatenated.
        self.qkv, self.gate_up = Parameter.fuse(f"{prefix}.qkv", qkv), Parameter.fuse(f"{prefix}.gate_up", gate_up)
        self.qkv_bias = Parameter.fuse(f"{prefix}.qkv.bias", qkv_bias) if qkv_bias else None
        self.gate_up_bias = Parameter.fuse(f"{prefix}.gate_up.bias", gate_up_bias) if gate_up_bias else None
        self.fused = [p for p in (self.qkv, self.gate_up, self.qkv_bias, self.gate_up_bias) if p is not None]
        self.out, self.down = out[0], down[0]
        self.out_bias, self.down_bias = (out_bias or [None])[0], (down_bias or [None])[0]

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        c = self.config
        h = ops.rms_norm(tape, x, self.norm1, c.norm_eps)
        qkv = ops.linear(tape, h, self.qkv, self.qkv_bias)  # (b, t, (h + 2k) e)
        angles = self.rotary.angles(tape, x.data)
        y = ops.attention(tape, qkv, c.n_heads, c.kv_heads, c.head_width ** -0.5, angles, batch.segments)
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

    def forward(self, tape: Tape, x: Tensor | None, batch: MicroBatch) -> Tensor:
        h = ops.rms_norm(tape, x, self.norm, self.eps)
        if batch.targets is None:
            return ops.logits(tape, h, self.table)
        return ops.cross_entropy(tape, h, self.table, batch.targets, batch.ignore_index)


def llama(config: LlamaConfig) -> Model:
    """The model as modules embed, layers.0 ... layers.(n-1), head."""
    embedding, rotary = Embedding(config), Rotary(config)
    blocks = [Block(config, index, rotary) for index in range(config.n_layers)]
    return Model([embedding, *blocks, Head(config, embedding.tokens)], config)
