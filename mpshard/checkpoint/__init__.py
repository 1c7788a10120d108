"""A checkpoint is the model: a Hugging Face directory that all ranks write at once and read their own ranges of.

    Saver(root, sharded, optim, settings).save(step, position)  all of it, from a training loop
    load_model(directory, comm=None, **options) -> Sharded      options: those of `mpshard.shard`
    load_training(sharded, optim, store) -> State               weights, moments, counters
    content_of(sharded, optim, state, ...) -> Content           what to write
    write(comm, root, content, device, keep) -> Path            root/step-N, and root/latest

Pure parts (`safetensors_file`, `extents`, `checksums`, `dtypes`, `manifest`, `publish`) can be imported without MPI; the
names above load it when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"CheckpointError": "manifest", "State": "manifest", "Store": "manifest", "open_store": "manifest",
          "content_of": "save", "write": "writing", "load_model": "load", "load_training": "load", "load_weights": "load",
          "check_weights": "load",
          "open_on_all": "load", "Saver": "saver"}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"mpshard.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'mpshard.checkpoint' has no attribute {name!r}")
