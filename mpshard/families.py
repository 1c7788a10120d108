"""What Hugging Face's config.json says of a model, in the words of our ``[model]`` section.

Whatever changes what a model computes and cannot be computed here is refused by name; nothing is loaded half right.
Where a key is missing, the default is that of the family's class in `transformers` 5.24. Dropout is a choice of the
training, not of the model: it is not taken over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from mpshard.schema import ConfigError, show

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
          "gelu": "gelu", "gelu_python": "gelu"}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as heads
_MAX_LEN = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file; `ConfigError` for one that is missing, unreadable or something else."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no file {os.fspath(path)}; is the directory a Hugging Face model's?") from None
    except OSError as error:
        raise ConfigError(f"cannot read {os.fspath(path)}: {error.strerror}") from None
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ConfigError(f"{os.fspath(path)} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{os.fspath(path)} holds no JSON object")
    return content


def model_directory(name: str) -> str:
    """The model that a directory stands for: itself, or the latest checkpoint of a run or of its folder of checkpoints."""
    for folder in (os.path.join(name, "checkpoints"), name):
        link = os.path.join(folder, "latest")
        if os.path.islink(link) and not os.path.exists(os.path.join(name, "config.json")):
            return os.path.join(folder, os.readlink(link))
    return name


def read_model_keys(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """``{"arch": "llama", "d_model": 576, ...}`` of the model in `directory`."""
    path = os.path.join(directory, "config.json")
    return model_keys(read_json(path), path)


def model_keys(content: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """The ``[model]`` keys of a config.json.

    Raises
    ------
    ConfigError : begins with `where`; an unknown model_type, quantised weights, a feature or an activation that we lack,
        a size that is missing.
    """
    kind = content.get("model_type")
    if kind is None:
        raise ConfigError(f"{where}: model_type is missing; there are {', '.join(FAMILIES)}")
    if kind not in FAMILIES:
        raise ConfigError(f"{where}: model_type={show(kind)} is not supported; there are {', '.join(FAMILIES)}")
    if content.get("quantization_config") is not None:
        raise ConfigError(f"{where}: quantization_config: quantised weights are not supported; use the model in fp32, bf16 or fp16")
    read = _Reader(content, where)
    return _gpt2(read) if kind == "gpt2" else _llama(read, kind)


class _Reader:
    """Values of a config.json, checked; null counts as missing."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where = content, where

    def get(self, name: str, default: Any = None) -> Any:
        value = self.content.get(name)
        return default if value is None else value

    def size(self, name: str, default: int = 0, *, missing_is_default: bool = False) -> int:
        value = self.get(name)
        if value is None and (default or missing_is_default):
            return default
        if type(value) is not int or value < 1:
            raise self.error(name, "must be a whole number above 0" if value is not None else "is missing")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not value > 0:
            raise self.error(name, "must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.error(name, "must be true or false")
        return value

    def refuse(self, name: str, *, unless: Any) -> None:
        """Refuse every value but the one that changes nothing."""
        if self.get(name, unless) != unless:
            raise self.error(name, f"is not supported, only {show(unless)}")

    def error(self, name: str, problem: str) -> ConfigError:
        value = self.content.get(name)
        return ConfigError(f"{self.where}: {name}{'' if value is None else f'={show(value)}'} {problem}")


def _gpt2(read: _Reader) -> dict[str, Any]:
    read.refuse("scale_attn_weights", unless=True)
    read.refuse("scale_attn_by_inverse_layer_idx", unless=False)
    read.refuse("add_cross_attention", unless=False)
    activation = read.get("activation_function", "gelu_new")
    if activation not in _GELUS:
        raise read.error("activation_function", f"is not supported; there are {', '.join(_GELUS)}")
    d_model = read.size("n_embd")
    return {
        "arch": "gpt2", "vocab_size": read.size("vocab_size"), "max_seq_len": read.size("n_positions", 1024),
        "n_layers": read.size("n_layer"), "d_model": d_model, "n_heads": read.size("n_head"),
        "d_ff": read.size("n_inner", 4 * d_model), "tie_embeddings": read.flag("tie_word_embeddings", True),
        "norm_eps": read.number("layer_norm_epsilon", 1e-5), "activation": _GELUS[activation]}


def _llama(read: _Reader, kind: str) -> dict[str, Any]:
    if read.get("hidden_act", "silu") not in ("silu", "swish"):
        raise read.error("hidden_act", 'is not supported, only "silu"')
    n_heads = read.size("num_attention_heads")
    keys = {
        "arch": kind, "vocab_size": read.size("vocab_size"),
        "max_seq_len": read.size("max_position_embeddings", _MAX_LEN[kind]),
        "n_layers": read.size("num_hidden_layers"), "d_model": read.size("hidden_size"), "n_heads": n_heads,
        "n_kv_heads": read.size("num_key_value_heads", _KV_HEADS.get(kind, n_heads)),
        "head_dim": read.size("head_dim", 128 if kind == "qwen3" else 0, missing_is_default=True),
        "d_ff": read.size("intermediate_size"), "tie_embeddings": read.flag("tie_word_embeddings"),
        "norm_eps": read.number("rms_norm_eps", 1e-6), **_rotary(read)}
    if kind in ("llama", "qwen3"):
        keys["attention_bias"] = read.flag("attention_bias")
    else:  # the classes of the other two do not look at it
        read.refuse("attention_bias", unless=kind == "qwen2")
    if kind == "llama":
        keys["mlp_bias"] = read.flag("mlp_bias")
    if kind == "mistral":
        window = read.content.get("sliding_window", 4096)
        keys["sliding_window"] = 0 if window is None else read.size("sliding_window", 4096)
    elif _has_sliding_layers(read):
        raise read.error("use_sliding_window", "is not supported: attention here sees all earlier positions")
    return keys


def _has_sliding_layers(read: _Reader) -> bool:
    """Whether any layer of a Qwen has a sliding window (Llama has no such keys)."""
    if not read.flag("use_sliding_window") or read.content.get("sliding_window", 4096) is None:
        return False
    layers = read.get("layer_types")
    if layers is not None:
        return "sliding_attention" in layers
    return read.get("max_window_layers", 28) < read.size("num_hidden_layers")


def _rotary(read: _Reader) -> dict[str, Any]:
    """Rotary keys from either spelling: rope_parameters, or rope_theta and rope_scaling."""
    rope = read.get("rope_parameters") or read.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{read.where}: rope_parameters={show(str(rope))} must be an object")
    inner = _Reader(rope, f"{read.where}: rope_parameters" if read.get("rope_parameters") else f"{read.where}: rope_scaling")
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{inner.where}: rope_type={show(kind)} is not supported; there are default, linear, llama3")
    for part in (read, inner):
        part.refuse("partial_rotary_factor", unless=1.0)
    keys: dict[str, Any] = {"rope_theta": inner.number("rope_theta", read.number("rope_theta", 10000.0))}
    if kind != "default":
        if inner.get("factor") is None:
            raise inner.error("factor", "is missing")
        keys |= {"rope_scaling": kind, "rope_factor": inner.number("factor", 1.0)}
    if kind == "llama3":
        keys |= {"rope_low_freq_factor": inner.number("low_freq_factor", 1.0),
                 "rope_high_freq_factor": inner.number("high_freq_factor", 4.0),
                 "rope_original_len": inner.size("original_max_position_embeddings",
                                                 read.size("max_position_embeddings", _MAX_LEN["llama"]))}
    return keys


def tokenizer_file(name: str) -> str:
    """The tokenizer.json that ``data.tokenizer`` names: itself, or in the directory that it is."""
    return os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name


def tokenizer_vocab_size(name: str) -> int:
    """One more than the largest id of a tokenizer.json."""
    path = tokenizer_file(name)
    if not os.path.exists(path):
        raise ConfigError(f'data.tokenizer={show(name)} is neither "bytes" nor a tokenizer.json nor a directory with one')
    content = read_json(path)
    try:
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]  # unigram: a list
        return 1 + max([*ids, *(token["id"] for token in content.get("added_tokens", []))])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path} is no tokenizer.json: it has no vocabulary") from None
