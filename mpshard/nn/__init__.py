"""Modules, models and initial values."""

from mpshard.nn.init import Constant, Init, Normal
from mpshard.nn.module import Cache, MicroBatch, Model, Module
from mpshard.nn.trainable import set_trainable

__all__ = ["Cache", "Constant", "Init", "MicroBatch", "Model", "Module", "Normal", "set_trainable"]
