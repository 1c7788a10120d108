"""An estimate of what forward leaves for backward. Everything else in this room is exact; this is not."""

from __future__ import annotations

from mpshard.device.numpy_loss import chunk_tokens
from mpshard.models import GPT2Config, LlamaConfig
from mpshard.nn.module import Model
from mpshard.shard.options import Options, recomputed
from mpshard.shard.precision import DTYPES

GPU_LOGITS = 256 << 20  # bytes of the chunk of logits that exists at a time on a GPU, at most, in float32: see cupy_device
AT_A_TIME = 4  # blocks whose activations are on a GPU that offloads them: one leaves, one computes, one comes, and the last one


def activation_bytes(model: Model, options: Options, tokens: int, on_host: bool = True) -> int:
    """Bytes of activations at their peak, for a micro-batch of `tokens`; expect it to be a tenth off.

    on_host: False for a GPU, whose activations are in the weights' format and may be offloaded.

    Per token, a block keeps what its rules need: the input of every product, q, k, v, what attention returned, and the
    residual stream twice. Norms and activations are made again unless train.recompute is "none"; a recomputed block
    keeps its input alone. On top: the block that is in backward, and the chunk of logits.
    """
    c = model.config
    if isinstance(c, GPT2Config):
        qkv, y, wide, hidden = 3 * c.d_model, c.d_model, c.ff, c.ff
    elif isinstance(c, LlamaConfig):
        qkv, y = (c.n_heads + 2 * c.kv_heads) * c.head_width, c.n_heads * c.head_width
        wide, hidden = 2 * c.ff, c.ff
    else:
        raise TypeError(f"no estimate for {type(c).__name__}")
    whole = qkv + y + 2 * c.d_model + wide + c.n_heads  # input of the block is the output of the last
    cheap = 2 * c.d_model + hidden
    kept = whole + (cheap if options.recompute == "none" else 0)
    blocks = len(model.modules) - 2
    again = len(recomputed(model, options.recompute))
    in_backward = cheap + wide + hidden + 2 * c.d_model
    present = 1.0 if on_host or not options.offloads_activations else min(1.0, AT_A_TIME / blocks)
    per_token = present * ((blocks - again) * kept + again * c.d_model) + (whole if again else 0) + in_backward + 2 * c.d_model
    itemsize = DTYPES[options.precision.master if on_host else options.precision.param].itemsize
    if on_host:
        logits = c.vocab_size * chunk_tokens(tokens, c.vocab_size, c.d_model, itemsize) * itemsize
    else:  # and their gradients, where these are shorter
        logits = c.vocab_size * max(1, min(tokens, GPU_LOGITS // (4 * c.vocab_size))) * (4 + (itemsize if itemsize < 4 else 0))
    return round(itemsize * tokens * per_token + logits)
