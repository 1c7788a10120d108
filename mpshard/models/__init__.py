"""Models, one file each: ordered lists of modules with Hugging Face parameter names."""

from dataclasses import fields

from mpshard.config import Config, ModelConfig
from mpshard.models.gpt2 import GPT2Config, gpt2
from mpshard.models.llama import LlamaConfig, llama
from mpshard.nn import Model, add_adapters, set_trainable

__all__ = ["GPT2Config", "LlamaConfig", "from_config", "gpt2", "llama", "model_of"]


def from_config(config: ModelConfig) -> Model:
    """The model of a resolved ``[model]`` section; shapes only."""
    if config.arch == "gpt2":
        return gpt2(GPT2Config(
            vocab_size=config.vocab_size, max_seq_len=config.max_seq_len, n_layers=config.n_layers, d_model=config.d_model,
            n_heads=config.n_heads, d_ff=config.d_ff, dropout=config.dropout, tie_embeddings=config.tie_embeddings,
            gelu_approximate=config.activation == "gelu_tanh", norm_eps=config.norm_eps))
    return llama(LlamaConfig(**{field.name: getattr(config, field.name) for field in fields(LlamaConfig)}))


def model_of(config: Config) -> Model:
    """The model of a whole, resolved configuration: the shapes, adapters, and which parameters learn."""
    model = from_config(config.model)
    if config.optim.trainable:
        set_trainable(model, config.optim.trainable)
    if config.lora.rank:
        add_adapters(model, config.lora)
    return model
