"""Modules, models and initial values."""

from mpshard.nn.init import Constant, Init, Normal
from mpshard.nn.lora import add_adapters
from mpshard.nn.module import Cache, MicroBatch, Model, Module
from mpshard.nn.trainable import set_trainable

__all__ = ["Cache", "Constant", "Init", "MicroBatch", "Model", "Module", "Normal", "add_adapters", "set_trainable"]
