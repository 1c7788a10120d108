"""The order of samples: a pure function of (seed, position), a new permutation each epoch, nothing stored.

A permutation of [0, n) is a Feistel network over the next even number of bits, walked: an image outside [0, n) is
permuted again until it falls inside, which keeps the map one-to-one (Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002, section 4). Every rank computes any position's sample by itself, so neither the number of ranks
nor a resume changes the order, and a corpus of 10^12 samples costs no memory.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
# At least 2^6 points however small n: with halves of 1 or 2 bits few of the n! orders would ever come up.
_MIN_BITS = 6


def sample_ids(positions: npt.ArrayLike, n: int, seed: int) -> npt.NDArray[np.int64]:
    """Which sample stands at each position of the endless stream of epochs.

    Positions [e n, (e + 1) n) hold every sample of [0, n) exactly once: epoch e.

    Parameters
    ----------
    positions : integers >= 0, any shape.
    n : samples of an epoch, 1 <= n < 2**62.
    seed : the order's; each epoch has its own permutation.

    Returns
    -------
    int64 of the shape of `positions`.
    """
    if n < 1:
        raise ValueError(f"a stream needs at least one sample, not {n}")
    positions = np.asarray(positions, np.int64)
    epochs, offsets = np.divmod(positions, n)
    ids = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = _permute(offsets[here], n, seed, int(epoch))
    return ids


def _permute(values: npt.NDArray[np.int64], n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The epoch's permutation of [0, n) at `values`."""
    half_bits = (max(_MIN_BITS, (n - 1).bit_length()) + 1) // 2
    keys = _round_keys(seed, epoch)
    x = values.astype(np.uint64)
    outside = np.ones(x.shape, bool)
    while outside.any():  # the domain is under 4 n (or 2^6), so few walks are long
        x[outside] = _feistel(x[outside], half_bits, keys)
        outside = x >= n
    return x.astype(np.int64)


def _feistel(x: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)
