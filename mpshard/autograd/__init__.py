"""Autograd-lite: tensors, a tape, and the operations of a transformer with their gradient rules."""

from mpshard.autograd import ops
from mpshard.autograd.tensor import Parameter, Tape, Tensor

__all__ = ["Parameter", "Tape", "Tensor", "ops"]
