"""The arithmetic of a step, counted from a model's shapes: which matrix products, how many floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass

from mpshard.models import GPT2Config
from mpshard.nn import Model

WIDEST_OUTPUT = 64 << 20  # bytes: a head's logits exist a chunk of tokens at a time, so they are timed no larger


@dataclass(frozen=True)
class Product:
    """A linear layer on `rows` tokens: forward y = x @ w, and in backward dx = dy @ w.T and dw = x.T @ dy.

    stored_in_out: the weight lies as (inner, columns), GPT-2's way; else as (columns, inner).
    """

    rows: int
    inner: int
    columns: int
    stored_in_out: bool = False

    @property
    def flops(self) -> int:
        """Of one of the three products; a multiplication and an addition are two."""
        return 2 * self.rows * self.inner * self.columns

    def __str__(self) -> str:
        return f"{self.rows} x {self.inner} x {self.columns}"


def products(model: Model, tokens: int) -> dict[Product, int]:
    """The linear layers of a model (its head included) on a micro-batch of `tokens`, and how often each occurs."""
    counts: dict[Product, int] = {}
    for module in model.modules:
        if not module.backward_reads_weights:  # an embedding: its rows are looked up, not multiplied
            continue
        parts = {part.name for fused in module.fused for part in fused.parts}
        weights = [p for p in [*module.parameters, *module.fused, *module.borrowed] if len(p.shape) == 2 and p.name not in parts]
        for weight in weights:
            is_head = weight is getattr(module, "table", None)
            in_out = isinstance(model.config, GPT2Config) and not is_head
            inner, columns = weight.shape if in_out else weight.shape[::-1]
            rows = min(tokens, max(1, WIDEST_OUTPUT // (4 * columns))) if is_head else tokens
            product = Product(rows, inner, columns, in_out)
            counts[product] = counts.get(product, 0) + 1
    return counts


def matrix_parameters(model: Model) -> int:
    """Elements of the weights that are multiplied: all matrices but embeddings, a tied head counted as the head."""
    return sum(product.inner * product.columns * count for product, count in products(model, 1).items())


def step_flops(model: Model, tokens: int, seq_len: int) -> int:
    """Floating-point operations of forward and backward on `tokens` in sequences of `seq_len`.

    6 x matrix parameters x tokens, and attention's two products over the causal half of the scores, three times
    (forward, and twice that in backward; what backward computes again is not counted). Chowdhery et al. 2022
    (arXiv:2204.02311), appendix B, with half of its attention term, since the other half is masked.
    """
    c = model.config
    width = c.n_heads * getattr(c, "head_width", c.d_model // c.n_heads)
    return 6 * tokens * (matrix_parameters(model) + c.n_layers * seq_len * width)
