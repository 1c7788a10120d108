"""GPT-2: learned positions, LayerNorm, GELU, Conv1D weights stored (in, out).

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; parameter names and orientation as
`transformers.GPT2LMHeadModel` saves them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpshard.autograd import Parameter, Tape, Tensor, ops
from mpshard.nn import Constant, MicroBatch, Model, Module, Normal


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2. d_ff: 0 means 4 * d_model. gelu_approximate: the tanh form ("gelu_new")."""

    vocab_size: int = 50257
    max_seq_len: int = 1024
    n_layers: int = 12
    d_model: int = 768
    n_heads: int = 12
    d_ff: int = 0
    dropout: float = 0.0
    tie_embeddings: bool = True
    gelu_approximate: bool = True
    norm_eps: float = 1e-5

    @property
    def ff(self) -> int:
        return self.d_ff or 4 * self.d_model


class Embedding(Module):
    name = "embed"
    backward_reads_weights = False

    def __init__(self, config: GPT2Config) -> None:
        self.dropout = config.dropout
        self.tokens = Parameter("transformer.wte.weight", (config.vocab_size, config.d_model), Normal(0.02))
        self.positions = Parameter("transformer.wpe.weight", (config.max_seq_len, config.d_model), Normal(0.01))
        self.looked_up = self.tokens
        self.parameters = [self.tokens, self.positions]

    def forward(self, tape: Tape, x: None, batch: MicroBatch) -> Tensor:
        return ops.dropout(tape, ops.embedding(tape, batch.ids, self.tokens, self.positions, batch.positions), self.dropout)


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    replayable = True

    def __init__(self, config: GPT2Config, index: int) -> None:
        d, f, prefix = config.d_model, config.ff, f"transformer.h.{index}"
        self.name, self.config = f"layers.{index}", config
        # Projections into the residual stream are scaled down by its number of summands (GPT-2 paper, section 2.3).
        into_residual = Normal(0.02 / math.sqrt(2 * config.n_layers))
        self.norm1_weight = Parameter(f"{prefix}.ln_1.weight", (d,), Constant(1.0))
        self.norm1_bias = Parameter(f"{prefix}.ln_1.bias", (d,), Constant(0.0))
        self.qkv_weight = Parameter(f"{prefix}.attn.c_attn.weight", (d, 3 * d), Normal(0.02), transposed=True)
        self.qkv_bias = Parameter(f"{prefix}.attn.c_attn.bias", (3 * d,), Constant(0.0))
        self.out_weight = Parameter(f"{prefix}.attn.c_proj.weight", (d, d), into_residual, transposed=True)
        self.out_bias = Parameter(f"{prefix}.attn.c_proj.bias", (d,), Constant(0.0))
        self.norm2_weight = Parameter(f"{prefix}.ln_2.weight", (d,), Constant(1.0))
        self.norm2_bias = Parameter(f"{prefix}.ln_2.bias", (d,), Constant(0.0))
        self.up_weight = Parameter(f"{prefix}.mlp.c_fc.weight", (d, f), Normal(0.02), transposed=True)
        self.up_bias = Parameter(f"{prefix}.mlp.c_fc.bias", (f,), Constant(0.0))
        self.down_weight = Parameter(f"{prefix}.mlp.c_proj.weight", (f, d), into_residual, transposed=True)
        self.down_bias = Parameter(f"{prefix}.mlp.c_proj.bias", (d,), Constant(0.0))
        self.parameters = [value for value in vars(self).values() if isinstance(value, Parameter)]

    def forward(self, tape: Tape, x: Tensor, batch: MicroBatch) -> Tensor:
        c = self.config
        h = ops.layer_norm(tape, x, self.norm1_weight, self.norm1_bias, c.norm_eps)
        qkv = ops.linear(tape, h, self.qkv_weight, self.qkv_bias, transposed=True)  # (b, t, 3d)
        y = ops.attention(tape, qkv, c.n_heads, c.n_heads, (c.d_model // c.n_heads) ** -0.5, None, batch.segments,
                          batch.memory_of(self.name))
        y = ops.linear(tape, y, self.out_weight, self.out_bias, transposed=True)  # (b, t, d)
        x = ops.residual(tape, x, y, c.dropout)
        h = ops.layer_norm(tape, x, self.norm2_weight, self.norm2_bias, c.norm_eps)
        h = ops.linear_gelu(tape, h, self.up_weight, self.up_bias, transposed=True, approximate=c.gelu_approximate)  # (b, t, f)
        h = ops.linear(tape, h, self.down_weight, self.down_bias, transposed=True)  # (b, t, d)
        return ops.residual(tape, x, h, c.dropout)


class Head(Module):
    name = "head"

    def __init__(self, config: GPT2Config, tokens: Parameter) -> None:
        d, self.eps = config.d_model, config.norm_eps
        self.norm_weight = Parameter("transformer.ln_f.weight", (d,), Constant(1.0))
        self.norm_bias = Parameter("transformer.ln_f.bias", (d,), Constant(0.0))
        self.parameters = [self.norm_weight, self.norm_bias]
        if config.tie_embeddings:
            self.table, self.borrowed = tokens, [tokens]
        else:
            self.table = Parameter("lm_head.weight", (config.vocab_size, d), Normal(0.02))
            self.parameters.append(self.table)

    def forward(self, tape: Tape, x: Tensor, batch: MicroBatch) -> Tensor:
        x = ops.last_position(tape, x) if batch.last_only else x
        h = ops.layer_norm(tape, x, self.norm_weight, self.norm_bias, self.eps)
        if batch.targets is None:
            return ops.logits(tape, h, self.table)
        return ops.cross_entropy(tape, h, self.table, batch.targets, batch.ignore_index)


def gpt2(config: GPT2Config) -> Model:
    """The model as modules embed, layers.0 ... layers.(n-1), head."""
    embedding = Embedding(config)
    blocks = [Block(config, index) for index in range(config.n_layers)]
    return Model([embedding, *blocks, Head(config, embedding.tokens)], config)
