"""The sharding story: layout, unit, schedule, engine, and `shard`, which puts them together.

`layout` and `schedule` are pure and can be imported without MPI; the names below load it when first used.

The room and its function have one name, and Python lets `mpshard.shard` mean whichever was imported last; so the room
is callable: `mpshard.shard(model)` is `mpshard.shard.shard(model)`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpshard.shard.build import shard
    from mpshard.shard.sharded import Sharded, StepOutput

__all__ = ["Sharded", "StepOutput", "shard"]

_HOMES = {"Sharded": "sharded", "StepOutput": "sharded", "shard": "build"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"mpshard.shard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'mpshard.shard' has no attribute {name!r}")


class _CallableRoom(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Sharded:
        return __getattr__("shard")(*args, **options)


sys.modules[__name__].__class__ = _CallableRoom
