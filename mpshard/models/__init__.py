"""Models, one file each: ordered lists of modules with Hugging Face parameter names."""

from mpshard.config import ModelConfig
from mpshard.models.gpt2 import GPT2Config, gpt2
from mpshard.models.llama import LlamaConfig, llama
from mpshard.nn import Model

__all__ = ["GPT2Config", "LlamaConfig", "from_config", "gpt2", "llama"]


def from_config(config: ModelConfig) -> Model:
    """The model of a resolved ``[model]`` section; shapes only."""
    if config.arch == "gpt2":
        return gpt2(GPT2Config(
            vocab_size=config.vocab_size, max_seq_len=config.max_seq_len, n_layers=config.n_layers, d_model=config.d_model,
            n_heads=config.n_heads, d_ff=config.d_ff, dropout=config.dropout, tie_embeddings=config.tie_embeddings,
            gelu_approximate=config.activation == "gelu_tanh", norm_eps=config.norm_eps))
    return llama(LlamaConfig(
        vocab_size=config.vocab_size, max_seq_len=config.max_seq_len, n_layers=config.n_layers, d_model=config.d_model,
        n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, d_ff=config.d_ff, dropout=config.dropout,
        tie_embeddings=config.tie_embeddings, attention_bias=config.attention_bias, mlp_bias=config.mlp_bias,
        rope_theta=config.rope_theta, norm_eps=config.norm_eps))
