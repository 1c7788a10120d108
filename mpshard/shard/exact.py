"""Sums that do not depend on their order, so that a norm or a loss is the same on any number of ranks, bit for bit.

Squares of float32 are exact in float64. Each is cut into pieces that are multiples of a common power of two, 20 bits a
piece, counted down from the largest square of all ranks; sums of such pieces are exact while they are fewer than
2^33, so any order gives the same. What lies 60 bits below the largest square is dropped, element by element.
After Demmel, Nguyen 2013, "Fast reproducible floating-point summation" (their pre-rounding, with fixed bins).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpshard.comm import collectives

if TYPE_CHECKING:
    from mpi4py import MPI

BITS, PIECES, BLOCK = 20, 3, 1 << 14


def sum_of_squares(comm: MPI.Comm, arrays: Sequence[np.ndarray]) -> float:
    """Sum of squares of all elements of all ranks' flat host arrays; equal on all ranks whatever the cut. Collective."""
    largest = max((float(np.abs(a).max()) for a in arrays if a.size), default=0.0)
    largest = float(collectives.all_max(comm, np.array([largest if math.isfinite(largest) else math.inf]))[0])
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    top = 2 * math.frexp(largest)[1]
    sums = np.zeros(PIECES)
    for array in arrays:
        for start in range(0, array.size, BLOCK):
            rest = np.square(array[start:start + BLOCK], dtype=np.float64)
            for piece in range(PIECES):
                unit = math.ldexp(1.0, top - BITS * (piece + 1))
                whole = np.rint(rest / unit)
                sums[piece] += whole.sum()
                rest -= whole * unit
    sums = collectives.all_reduce(comm, sums)
    return math.fsum(float(s) * math.ldexp(1.0, top - BITS * (piece + 1)) for piece, s in enumerate(sums))


def sum_of_values(comm: MPI.Comm, values: Sequence[float]) -> float:
    """The exactly rounded sum of all ranks' numbers. Collective."""
    return math.fsum(value for of_rank in comm.allgather(list(values)) for value in of_rank)
