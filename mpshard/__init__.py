"""mpshard: fully sharded training of transformers on Python, arrays and MPI.

    from mpi4py import MPI
    import mpshard as mps

    model = mps.models.llama(mps.LlamaConfig(n_layers=6, d_model=512))
    sharded = mps.shard(model, MPI.COMM_WORLD)
    optim = mps.AdamW(sharded, lr=3e-4)

Importing this package imports neither MPI nor CuPy: a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a room and a function share this name (see mpshard.shard): tell type checkers that it is called
    from mpshard.shard import shard as shard

__version__ = "0.1.0"

_HOMES = {
    "AdamW": "mpshard.optim",
    "GPT2Config": "mpshard.models",
    "LlamaConfig": "mpshard.models",
    "LoraConfig": "mpshard.config",
    "Muon": "mpshard.optim",
    "SGD": "mpshard.optim",
    "Sampling": "mpshard.sample",
    "Saver": "mpshard.checkpoint",
    "Sharded": "mpshard.shard",
    "StepOutput": "mpshard.shard",
    "add_adapters": "mpshard.nn",
    "generate": "mpshard.sample",
    "learning_rate": "mpshard.optim",
    "load_model": "mpshard.checkpoint",
    "set_trainable": "mpshard.nn",
}
_ROOMS = ("autograd", "checkpoint", "comm", "config", "data", "device", "models", "nn", "observe", "optim", "shard")

__all__ = ["__version__", *_HOMES, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"mpshard.{name}")
    raise AttributeError(f"module 'mpshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
