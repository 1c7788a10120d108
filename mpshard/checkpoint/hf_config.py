"""config.json: a model's shapes in Hugging Face's words, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpshard import families
from mpshard.models import GPT2Config, LlamaConfig

_TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def to_hf(config: GPT2Config | LlamaConfig, dtype: str = "F32", special_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of config.json, with which `transformers` opens the directory.

    dtype: of the weights in the file. special_ids: which tokens begin and end a text, as {"eos_token_id": 2}.
    """
    common = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_embeddings, "dtype": _TORCH[dtype],
              "torch_dtype": _TORCH[dtype], "bos_token_id": None, "eos_token_id": None, "use_cache": True, **(special_ids or {})}
    if isinstance(config, GPT2Config):
        return common | {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": config.max_seq_len,
            "n_embd": config.d_model, "n_layer": config.n_layers, "n_head": config.n_heads, "n_inner": config.ff,
            "activation_function": "gelu_new" if config.gelu_approximate else "gelu",
            "layer_norm_epsilon": config.norm_eps, "resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
            "attn_pdrop": 0.0}  # of attention's weights: mpshard drops none
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.arch]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != "none":
        rope |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        rope |= {"low_freq_factor": config.rope_low_freq_factor, "high_freq_factor": config.rope_high_freq_factor,
                 "original_max_position_embeddings": config.rope_original_len or config.max_seq_len}
    written = common | {
        "architectures": [f"{name}ForCausalLM"], "model_type": config.arch, "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.d_model, "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "intermediate_size": config.ff,
        "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "attention_dropout": 0.0,
        "rope_theta": config.rope_theta, "rope_parameters": rope}
    if config.rope_scaling != "none":  # before version 5, transformers reads this spelling alone
        written["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    own: dict[str, dict[str, Any]] = {"llama": {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias},
           "mistral": {"sliding_window": config.sliding_window or None},
           "qwen2": {"use_sliding_window": False},
           "qwen3": {"use_sliding_window": False, "attention_bias": config.attention_bias}}
    return written | own[config.arch]


def from_hf(content: dict[str, Any], where: str = "config.json") -> GPT2Config | LlamaConfig:
    """The configuration that config.json says, without dropout. Raises ConfigError, beginning with `where`, for what is not supported."""
    keys = families.model_keys(content, where)
    if keys.pop("arch") == "gpt2":
        return GPT2Config(gelu_approximate=keys.pop("activation") == "gelu_tanh", **keys)
    return LlamaConfig(arch=content["model_type"], **keys)
