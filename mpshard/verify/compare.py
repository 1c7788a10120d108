"""Two runs side by side: losses, norms, and the weights they ended with, element by element."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = "numbers.json"


class Dump:
    """What the ranks of one run left in a folder: see `mpshard.verify.dump`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        numbers = json.loads((folder / NUMBERS).read_text())
        self.losses: list[float] = numbers["losses"]
        self.norms: list[float] = numbers["norms"]
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in numbers["shapes"].items()}

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[int, int, Any, str]]]:
        """{tensor: [(start, stop, file, key)]}; arrays are read when asked for."""
        found: dict[str, list[tuple[int, int, Any, str]]] = {}
        for path in sorted(self.folder.glob("rank-*.npz")):
            file = np.load(path)
            for key in file.files:
                name, start, stop = key.rsplit("|", 2)
                found.setdefault(name, []).append((int(start), int(stop), file, key))
        return found

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, whole, put together from what the ranks held of it."""
        parts = sorted(self._pieces.get(name, ()), key=lambda part: part[0])
        flat = [file[key] for _, _, file, key in parts]
        return np.concatenate(flat).reshape(self.shapes[name]) if flat else np.zeros(self.shapes[name], np.float32)


@dataclass(frozen=True)
class Element:
    """The first element of the first tensor in which two runs differ. ulps: units in the last place between them."""

    tensor: str
    index: tuple[int, ...]
    value: float
    reference: float
    ulps: int


@dataclass(frozen=True)
class Difference:
    """How far a run is from the reference.

    loss, norm: the largest relative difference over the steps. first_step: the first (from 1) whose loss or norm has other
    bits; 0 if none has. tensors: how many end with other bits, `first` the first of them. weights: the largest
    |difference| / |reference| of a tensor (2-norms), `worst` its name. ulps: the most of any element.
    """

    loss: float
    norm: float
    first_step: int
    tensors: int
    first: Element | None
    weights: float
    worst: str
    ulps: int

    def within(self, rtol: float) -> bool:
        """No more than `rtol`; with 0 not a bit. Not finite is not within."""
        if rtol == 0:
            return not self.first_step and not self.tensors
        return max(self.loss, self.norm, self.weights) <= rtol

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(run: Dump, reference: Dump) -> Difference:
    """Runs of one model over the same steps."""
    pairs = list(zip([*run.losses, *run.norms], [*reference.losses, *reference.norms], strict=True))
    steps = len(run.losses)
    first_step = min((1 + number % steps for number, (a, b) in enumerate(pairs) if a != b), default=0)
    differing, first, weights, worst, most = 0, None, 0.0, "", 0
    for name in reference.shapes:
        a, b = run.tensor(name), reference.tensor(name)
        ulps = ulp_distance(a, b)
        if not ulps.any():
            continue
        differing += 1
        most = max(most, int(ulps.max()))
        if first is None:
            index = tuple(int(i) for i in np.unravel_index(int(np.flatnonzero(ulps)[0]), a.shape))
            first = Element(name, index, float(a[index]), float(b[index]), int(ulps[index]))
        apart = _relative(float(np.linalg.norm(np.subtract(a, b, dtype=np.float64))), float(np.linalg.norm(b.astype(np.float64))))
        if not apart <= weights:
            weights, worst = apart, name
    return Difference(max(_relative(abs(a - b), abs(b)) for a, b in pairs[:steps]),
                      max(_relative(abs(a - b), abs(b)) for a, b in pairs[steps:]), first_step, differing, first, weights, worst, most)


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between a and b (one format, one shape), element by element; int64.

    +0 and -0 are 1 apart: they are different bits.
    """
    kind = np.dtype(f"i{a.dtype.itemsize}")
    lowest = np.iinfo(kind).min

    def place(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x).view(kind)
        return np.where(bits < 0, ~bits ^ lowest, bits).astype(object if kind.itemsize == 8 else np.int64)

    return np.abs(place(a) - place(b)).astype(np.int64)


def _relative(difference: float, size: float) -> float:
    """0 where nothing differs, infinite where something does from zero or is not finite."""
    if difference == 0:
        return 0.0
    return difference / size if size and np.isfinite(difference) else float("inf")
