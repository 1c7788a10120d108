"""adapter_config.json: low-rank adapters in the words of PEFT (`peft` 0.21), and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpshard.families import read_json
from mpshard.schema import ConfigError, show

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every adapter's tensors
# What may be set without changing what an adapter computes; anything else that is set is a feature that we lack.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision", "target_modules", "task_type"}
_FIRST_VALUES = (True, False, "gaussian")  # of init_lora_weights; others change the model itself


def is_adapter(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds adapters, and not the model that they adapt."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return os.path.exists(os.path.join(directory, CONFIG)) and not any(os.path.exists(os.path.join(directory, n)) for n in names)


def read_keys(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """rank, alpha, targets of the adapters in a directory, and base, the model that they were made for.

    Raises ConfigError for adapters of another kind or with a feature that we lack, by name.
    """
    path = os.path.join(directory, CONFIG)
    content = read_json(path)
    if content.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type={show(content.get('peft_type', ''))} is not supported; there is LORA")
    unknown = sorted(key for key, value in content.items() if key not in _HARMLESS and value not in (None, False, "none", {}, []))
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]}={show(content[unknown[0]])} is not supported")
    if content.get("bias", "none") != "none" or content.get("init_lora_weights", True) not in _FIRST_VALUES:
        raise ConfigError(f"{path}: only bias=none and init_lora_weights=true, false or gaussian are supported")
    rank, alpha, targets = content.get("r"), content.get("lora_alpha"), content.get("target_modules")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ConfigError(f"{path}: r and lora_alpha must be numbers above 0")
    if targets == "all-linear":
        targets = []
    if not isinstance(targets, list):
        raise ConfigError(f"{path}: target_modules={show(targets or '')} is a pattern; a list of names is needed")
    return {"rank": rank, "alpha": float(alpha), "targets": tuple(sorted(targets)), "base": content.get("base_model_name_or_path") or ""}


def to_peft(rank: int, alpha: float, dropout: float, modules: Sequence[str], others: Sequence[str], transposed: bool,
            base: str) -> dict[str, Any]:
    """The content of adapter_config.json.

    modules: names of the adapted linear layers; others: of those that have none. transposed: their weights are stored
    (inputs, outputs). base: the directory of the model.
    """
    ends = {name.rpartition(".")[2] for name in modules}
    short = not any(name.rpartition(".")[2] in ends for name in others)
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": os.path.abspath(base) if base else None,
        "r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": sorted(ends if short else modules),
        "fan_in_fan_out": transposed, "bias": "none", "inference_mode": True, "init_lora_weights": True, "modules_to_save": None,
        "use_rslora": False, "use_dora": False, "revision": None}
