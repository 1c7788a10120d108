"""What weights and gradients look like on their way: the masters stay in full precision, messages may be shorter.

On the CPU a gathered unit is widened to float32 before it computes, and activations and sums are float32. Products round their
inputs to bf16 where the processor multiplies that faster (see `mpshard.device.compiled` and `mkl`) and are float32's elsewhere,
so that bf16 then means "weights rounded to bf16", half the bytes of a gather, and the same loss curve to rounding. On a GPU
weights and activations are 16-bit as they arrive, products and all sums inside kernels are float32.

Products of 8 bits are another matter: what travels and what is kept stay as they were, and the inputs of a block's products are
rounded just before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from mpshard.config import ConfigError, PrecisionConfig
from mpshard.device.base import Array, Device
from mpshard.device.numpy_fp8 import BLOCK

DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64), "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Precision:
    """Names of formats, see DTYPES.

    param: of gathered weights. gather: what they travel as, "" for `param`. reduce: what gradients travel as; their
    sum is in `master`'s format. master: of the slices, the moments and, on the CPU, the arithmetic. tf32: let a GPU's
    tensor cores round the inputs of fp32 products to 10 bits after the point. products: what the blocks' products round
    their inputs to, "" or "fp8": see `Device.matmul_fp8`.
    """

    param: str = "fp32"
    gather: str = ""
    reduce: str = "fp32"
    master: str = "fp32"
    tf32: bool = False
    products: str = ""

    def __post_init__(self) -> None:
        for key, known in (("param", ("fp32", "fp64", "bf16", "fp16")), ("gather", ("", "fp8_e4m3")),
                           ("reduce", ("fp32", "fp64", "bf16", "fp16")), ("master", ("fp32", "fp64")),
                           ("products", ("", "fp8"))):
            if getattr(self, key) not in known:
                raise ConfigError(f"precision.{key}={getattr(self, key)!r} is not known; use {', '.join(filter(None, known))}")

    @classmethod
    def of(cls, config: PrecisionConfig) -> Precision:
        """What the configuration says; its "param" is the default here."""
        return cls(config.param, config.gather.removeprefix("param"), config.reduce, tf32=config.tf32,
                   products=config.products.removeprefix("param"))

    @property
    def wire(self) -> Wire:
        """How slices are written for a gather."""
        if self.gather:
            return Scaled()
        return Plain(DTYPES[self.master]) if self.param == self.master else Rounded(DTYPES[self.param])

    def arithmetic(self, device: Device) -> np.dtype[Any]:
        """What a full unit is kept in and computed with: on the CPU the masters' format, on a GPU `param`'s."""
        return DTYPES[self.master if device.on_host else self.param]

    def gradient(self, device: Device) -> np.dtype[Any]:
        """What backward writes a full gradient in: on the CPU the masters' format, on a GPU what it travels as."""
        return DTYPES[self.master if device.on_host else self.reduce]


class Wire(Protocol):
    """A format for slices of weights on their way.

    dtype: of the words that travel. size(m): how many words a slice of m elements takes.
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def size(self, elements: int) -> int: ...

    def encode(self, device: Device, master: Array, words: Array) -> None:
        """Write a slice (m,) as words (size(m),)."""

    def decode(self, device: Device, words: Array, full: Array, slices: int) -> None:
        """Read `slices` slices' words (slices * size(m),) into full (slices * m,)."""


@dataclass(frozen=True)
class Plain:
    """As the masters are: they travel themselves, nothing is encoded or decoded."""

    dtype: np.dtype[Any]

    def size(self, elements: int) -> int:
        return elements

    def encode(self, device: Device, master: Array, words: Array) -> None:
        if words is not master:
            device.cast(master, words)

    def decode(self, device: Device, words: Array, full: Array, slices: int) -> None:
        device.cast(words, full)


@dataclass(frozen=True)
class Rounded(Plain):
    """Each element rounded to a 16-bit format, to the nearest, ties to even."""


@dataclass(frozen=True)
class Scaled:
    """8-bit floats with one scale for each block of elements, 129 bytes for 512: see `Device.pack_fp8`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def size(self, elements: int) -> int:
        return elements + -(-elements // BLOCK)

    def encode(self, device: Device, master: Array, words: Array) -> None:
        device.pack_fp8(master, words)

    def decode(self, device: Device, words: Array, full: Array, slices: int) -> None:
        device.unpack_fp8(words, full, slices)


class LossScale:
    """Dynamic loss scaling for fp16 gradients: as large a scale as does not overflow.

    After `hysteresis` overflows in a row the scale is halved (never below `floor`), after `window` steps without one it
    is doubled. Micikevicius et al. 2017 (arXiv:1710.03740), section 3.2; hysteresis as in Megatron and DeepSpeed.
    """

    def __init__(self, value: float = 2.0**16, window: int = 1000, hysteresis: int = 2, floor: float = 1.0) -> None:
        self.value, self.window, self.hysteresis, self.floor = value, window, hysteresis, floor
        self.good, self.patience = 0, hysteresis

    def update(self, finite: bool) -> None:
        """Tell of a step: whether its gradients were finite, on all ranks."""
        if finite:
            self.good += 1
            if self.good % self.window == 0:
                self.value *= 2
                self.patience = self.hysteresis
            return
        self.good = 0
        self.patience -= 1
        if self.patience <= 0:
            self.value = max(self.floor, self.value / 2)

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good": self.good, "patience": self.patience}

    def load_state(self, state: dict[str, float]) -> None:
        self.value, self.good, self.patience = state["value"], int(state["good"]), int(state["patience"])
