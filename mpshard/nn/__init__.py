"""Modules, models and initial values."""

from mpshard.nn.init import Constant, Init, Normal
from mpshard.nn.module import MicroBatch, Model, Module

__all__ = ["Constant", "Init", "MicroBatch", "Model", "Module", "Normal"]
