"""Dropout from a counter-based generator: the mask is a pure function of a key and an element's index.

Note on the generator. Element i of key (k0, k1) gets the 32-bit word

    word = mix(mix(low ^ a) + b)        low, high: the two halves of i
    mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16   (modulo 2^32)

where mix is a bijection of 32-bit words that changes half of the output bits for any one input bit (the constants
are Wellons's "lowbias32", found by search, https://nullprogram.com/blog/2018/07/31). (a, b) is the key passed
through three Feistel rounds with the same mix, so that keys which differ in one bit share nothing:

    a = k0 ^ mix(k1 + 0x9e3779b9);  b = k1 ^ mix(a + high + 0x85ebca6b);  a ^= mix(b + 0xc2b2ae35)

The element is kept where word >= round(probability * 2^32). Only 32-bit integers and one compare: any device
computes the same mask, in any order.
"""

from __future__ import annotations

import numpy as np

from mpshard.device.numpy_memory import NumpyMemory, block_rows, blocks, flat

_WORD = 0xFFFFFFFF


class DropoutKernels(NumpyMemory):
    """The dropout part of `mpshard.device.base.Device`."""

    def dropout(
        self, x: np.ndarray, probability: float, key: tuple[int, int], out: np.ndarray | None = None
    ) -> np.ndarray:
        if not 0 <= probability < 1:
            raise ValueError(f"dropout probability must be in [0, 1), not {probability}")
        if out is None:
            out = self.empty(x.shape, x.dtype)
        x1, out1 = flat(x), flat(out)
        rows = block_rows(x.size, 4)
        counter = np.arange(rows, dtype=np.uint32)
        words, scratch = self.empty((2, rows), np.uint32)
        kept = np.empty(rows, bool)
        threshold, gain = round(probability * 2**32), 1 / (1 - probability)
        for block in blocks(x.size, 4):
            count = block.stop - block.start
            w, keep = words[:count], kept[:count]
            random_words(key, block.start, counter[:count], w, scratch[:count])
            np.greater_equal(w, threshold, out=keep)
            np.multiply(x1[block], gain, out=out1[block])
            out1[block] *= keep
        return out


def random_words(
    key: tuple[int, int], start: int, counter: np.ndarray, out: np.ndarray, scratch: np.ndarray
) -> None:
    """Words of elements start + counter into `out`, all uint32; the range must not cross a multiple of 2^32."""
    a, b = spread_key(key, start >> 32)
    np.add(counter, np.uint32(start & _WORD), out=out)
    out ^= np.uint32(a)
    _mix(out, scratch)
    out += np.uint32(b)
    _mix(out, scratch)


def _mix(x: np.ndarray, scratch: np.ndarray) -> None:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        np.right_shift(x, shift, out=scratch)
        x ^= scratch
        x *= np.uint32(factor)
    np.right_shift(x, 16, out=scratch)
    x ^= scratch


def _mix_word(x: int) -> int:
    x &= _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & _WORD
    return x ^ (x >> 16)


def spread_key(key: tuple[int, int], high: int) -> tuple[int, int]:
    k0, k1 = key
    a = k0 ^ _mix_word(k1 + 0x9E3779B9)
    b = k1 ^ _mix_word(a + high + 0x85EBCA6B)
    return a ^ _mix_word(b + 0xC2B2AE35), b
