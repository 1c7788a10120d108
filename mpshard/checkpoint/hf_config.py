"""config.json: a model's shapes in Hugging Face's words, and back."""

from __future__ import annotations

from typing import Any

from mpshard.models import GPT2Config, LlamaConfig

_TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def to_hf(config: GPT2Config | LlamaConfig, dtype: str = "F32", separator: int | None = None) -> dict[str, Any]:
    """The content of config.json, with which `transformers` opens the directory.

    dtype: of the weights in the file. separator: the token that ends a document, begins and ends generation.
    """
    common = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_embeddings, "dtype": _TORCH[dtype],
              "torch_dtype": _TORCH[dtype], "bos_token_id": separator, "eos_token_id": separator, "use_cache": True}
    if isinstance(config, GPT2Config):
        return common | {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": config.max_seq_len,
            "n_embd": config.d_model, "n_layer": config.n_layers, "n_head": config.n_heads, "n_inner": config.ff,
            "activation_function": "gelu_new" if config.gelu_approximate else "gelu",
            "layer_norm_epsilon": config.norm_eps, "resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
            "attn_pdrop": 0.0}  # of attention's weights: mpshard drops none
    return common | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.d_model, "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "intermediate_size": config.ff,
        "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias, "attention_dropout": 0.0, "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}


def from_hf(content: dict[str, Any]) -> GPT2Config | LlamaConfig:
    """The configuration of a model that `to_hf` wrote down."""
    c = content
    if c["model_type"] == "gpt2":
        return GPT2Config(
            vocab_size=c["vocab_size"], max_seq_len=c["n_positions"], n_layers=c["n_layer"], d_model=c["n_embd"],
            n_heads=c["n_head"], d_ff=c["n_inner"] or 0, dropout=c["resid_pdrop"], tie_embeddings=c["tie_word_embeddings"],
            gelu_approximate=c["activation_function"] == "gelu_new", norm_eps=c["layer_norm_epsilon"])
    return LlamaConfig(
        vocab_size=c["vocab_size"], max_seq_len=c["max_position_embeddings"], n_layers=c["num_hidden_layers"],
        d_model=c["hidden_size"], n_heads=c["num_attention_heads"], n_kv_heads=c["num_key_value_heads"],
        d_ff=c["intermediate_size"], tie_embeddings=c["tie_word_embeddings"], attention_bias=c["attention_bias"],
        mlp_bias=c["mlp_bias"], rope_theta=c["rope_theta"], norm_eps=c["rms_norm_eps"])
