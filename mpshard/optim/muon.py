"""Muon: momentum made orthogonal, for the matrices of the blocks; AdamW for everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon);
for the scale of the update Liu et al. 2025, "Muon is scalable for LLM training" (arXiv:2502.16982), section 2.2.

Note on sharding. Momentum is element by element, so each rank keeps and updates its own slices' part. Making a matrix
orthogonal needs the whole matrix: every matrix has one owner, and what ranks hold of it travels there and the update
back, in one exchange each way for the whole model, so that all ranks compute at the same time on matrices dealt out by
their cost. A rank sends about 1/N of all matrices twice, and holds that much for the time of the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpshard.config import ConfigError
from mpshard.device.base import Array, Device, Kind
from mpshard.device.lasting import visits
from mpshard.optim.adamw import AdamW
from mpshard.optim.owners import Owners, Shape
from mpshard.shard.layout import Segment

if TYPE_CHECKING:
    from mpshard.shard.sharded import Sharded
    from mpshard.shard.unit import Unit

SCALES = ("moonshot", "jordan")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's quintic: it takes singular values from (0, 1] to about 0.7 ... 1.2
ITERATIONS = 5


def cost(shape: Shape) -> int:
    """Multiplications of an iteration: two products over the longer side and one of the square."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def orthogonalise(device: Device, x: Array) -> Array:
    """(r, c) -> (r, c), about U V' of x = U S V': five iterations of Newton-Schulz, in the precision of x.

    Jordan's zeropower_via_newtonschulz5. May overwrite x.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    if tall:  # the square is the smaller one
        x = _turned(device, x)
    device.blend(x, x, 0, 1 / (math.sqrt(device.read([device.sum_of_squares(x.reshape(-1))])[0]) + 1e-7))
    for _ in range(ITERATIONS):
        square = device.matmul(x, x.T)
        polynomial = device.matmul(square, square)
        device.blend(polynomial, square, c, b)
        product = device.matmul(polynomial, x)
        device.blend(x, product, a, 1)
    return _turned(device, x) if tall else x


def _turned(device: Device, x: Array) -> Array:
    """The transpose, in memory of its own."""
    out = device.empty(x.shape[::-1], x.dtype, Kind.STAGING)
    out[...] = x.T
    return out


def update_scale(outputs: int, inputs: int, choice: str) -> float:
    """What the orthogonal matrix is multiplied with.

    "jordan": sqrt(max(1, outputs / inputs)). "moonshot": 0.2 sqrt(max(outputs, inputs)), which gives the update AdamW's
    usual size, so that it shares learning rate and weight decay with the rest of the model.
    """
    if choice == "jordan":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(outputs, inputs))


class Muon(AdamW):
    """Muon for the blocks' matrices, AdamW for embeddings, head, norms and biases.

    Parameters
    ----------
    momentum: of the matrices; in Nesterov's form, as Jordan's. lr: of everything; lr_factor: the matrices' rate over it.
    scale: see `update_scale`. betas, eps: of the rest's AdamW. The other parameters: see `Optimizer`.

    Jordan's own runs have scale="jordan", a rate of 0.02 for the matrices and 3e-4 for the rest.
    """

    name = "muon"

    def __init__(self, sharded: Sharded, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 weight_decay: float = 0.1, clip_grad_norm: float = 1.0, no_decay: Sequence[str] | None = None, moments: str = "fp32",
                 ema: float = 0.0, momentum: float = 0.95, lr_factor: float = 1.0, scale: str = "moonshot") -> None:
        if scale not in SCALES:
            raise ConfigError(f"optim.muon_scale={scale!r} is not known; use {', '.join(SCALES)}")
        self.shapes = sharded.model.matrices
        if not self.shapes:
            raise ConfigError("optim.name=muon: the blocks have no matrix that learns; use adamw")
        super().__init__(sharded, lr, betas, eps, weight_decay, clip_grad_norm, no_decay, moments, ema)
        self.momentum, self.lr_factor = momentum, lr_factor
        self.parts: dict[str, Array] = {}  # during an update: this rank's elements of each matrix's orthogonal direction
        units = {name: unit for name, unit in sharded.units.items() if unit.learns}
        self.buffers = {name: self._moments(unit, ("momentum_buffer",), [s for s in unit.segments if s.name in self.shapes])
                        for name, unit in units.items()}
        self.owners = Owners(sharded.mesh.slices, {name: unit.layout for name, unit in units.items()}, self.shapes,
                             {name: cost(shape) for name, shape in self.shapes.items()}, sharded.device,
                             next(iter(units.values())).dtype, sharded.options.replicated)
        turned = {p.name for p in sharded.model.parameters if p.transposed}
        self.factors = {name: update_scale(columns, rows, scale) if name in turned else update_scale(rows, columns, scale)
                        for name, (rows, columns) in self.shapes.items()}

    def is_elementwise(self, name: str) -> bool:
        return name not in self.shapes

    def state_tensors(self, unit: Unit, segment: Segment) -> dict[str, Array]:
        return super().state_tensors(unit, segment) | self.buffers[unit.name].of(segment)

    def update_all(self, scale: float) -> None:
        device = self.sharded.device
        self.parts = self.owners.spread({name: orthogonalise(device, matrix)
                                         for name, matrix in self.owners.collect(self._directions(scale)).items()})
        super().update_all(scale)
        self.parts = {}

    def update_unit(self, unit: Unit, scale: float) -> None:
        super().update_unit(unit, scale)
        rate = self.lr * self.lr_factor
        for s in self.buffers[unit.name].segments:
            keep = 1 - rate * self.weight_decay if self.decayed[s.name] else 1.0
            self.sharded.device.blend(unit.shard[s.slice], self.parts[s.name], keep, -rate * self.factors[s.name])

    def _directions(self, scale: float) -> dict[str, Array]:
        """Momentum takes in the gradient. {matrix: what is to be made orthogonal, this rank's elements, flat}."""
        found: dict[str, Array] = {}
        for name in visits(self.sharded.device, list(self.buffers), lambda name: list(self.buffers[name].lasting.values())):
            unit, moments = self.sharded.units[name], self.buffers[name]
            ahead = self.sharded.device.empty(unit.shard.size, unit.dtype, Kind.STAGING)
            for run, (buffer,) in moments.visit(self.steps):
                gradient, share = unit.gradient[run.where], scale * (1 - self.momentum)
                self.sharded.device.blend(buffer, gradient, self.momentum, share)
                ahead[run.where] = buffer
                # Nesterov: the gradient again, as if the next one were the same.
                self.sharded.device.blend(ahead[run.where], gradient, self.momentum, share)
            found |= {s.name: ahead[s.slice] for s in moments.segments}
        return found
