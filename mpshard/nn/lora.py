"""Low-rank adapters: a frozen matrix W computes as W + (alpha / rank) B A, and only B and A learn.

Hu et al. 2021 (arXiv:2106.09685), eq. 3: A is random at first and B zero, so that training starts at the model as it is.
They are parameters of the block's module like any others: sharded, reduced, saved in the same way, under PEFT's names.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from mpshard.adapters import PREFIX, to_peft
from mpshard.autograd.tensor import Adapter, Parameter
from mpshard.config import ConfigError, LoraConfig
from mpshard.nn.init import Constant, Normal
from mpshard.nn.module import Model
from mpshard.nn.trainable import nearest


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter, by its name."""
    return name.startswith(PREFIX)


def linear_layers(model: Model) -> dict[str, Parameter]:
    """{name of the layer in the Hugging Face model: its weight} of those in blocks, which may be adapted."""
    return {p.name.removesuffix(".weight"): p for module in model.modules[1:-1] for p in module.parameters
            if len(p.shape) == 2 and not is_adapter(p.name)}


def add_adapters(model: Model, config: LoraConfig) -> None:
    """Freeze the model and give those of its linear layers that match `config.targets` an adapter; before `shard`.

    A target is the end of a layer's name ("q_proj", "mlp.c_fc"), as in PEFT, or a pattern for all of it ("*.layers.3.*").

    Raises ConfigError for a target that no layer is called, with the nearest names.
    """
    layers = linear_layers(model)
    for target in config.targets:
        if not any(_matches(name, target) for name in layers):
            raise ConfigError(f'lora.targets: no linear layer is called "{target}"{nearest(target, layers)}')
    for parameter in model.parameters:
        parameter.trainable = False
    adapted = {name for name in layers if not config.targets or any(_matches(name, target) for target in config.targets)}
    scale = (config.alpha or 2.0 * config.rank) / config.rank
    for module in model.modules[1:-1]:
        for weight in list(module.parameters):
            name = weight.name.removesuffix(".weight")
            if name in adapted:
                outputs, inputs = reversed(weight.shape) if weight.transposed else weight.shape
                # As large as PEFT's first values, which are uniform in -1 / sqrt(inputs) ... 1 / sqrt(inputs).
                a = Parameter(f"{PREFIX}{name}.lora_A.weight", (config.rank, inputs), Normal(1 / math.sqrt(3 * inputs)))
                b = Parameter(f"{PREFIX}{name}.lora_B.weight", (outputs, config.rank), Constant(0.0))
                weight.adapter = Adapter(a, b, scale, config.dropout)
                module.parameters = [*module.parameters, a, b]
    model.lora = config


def peft_config(model: Model, base: str) -> dict[str, Any]:
    """The content of adapter_config.json for a model with adapters. base: the directory of the model without."""
    layers = linear_layers(model)
    adapted = [name for name, weight in layers.items() if weight.adapter is not None]
    c, transposed = model.lora, layers[adapted[0]].transposed
    assert c is not None, "the model has no adapters"
    return to_peft(c.rank, c.alpha or 2.0 * c.rank, c.dropout, adapted, [name for name in layers if name not in adapted], transposed, base)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or fnmatchcase(name, target)
