"""CRC-32 of pieces, and of their concatenation without their bytes.

A range of a tensor that one rank wrote is read back by several when their number has changed. Each computes the checksum
of what it reads, and the checksums are joined: so every byte is verified by the rank that reads it anyway.
"""

from __future__ import annotations

from functools import lru_cache

POLYNOMIAL = 0xEDB88320  # of CRC-32 (IEEE 802.3, and zlib), lowest bit = highest power


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2) modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 nbytes) modulo the CRC's polynomial: what `nbytes` further bytes multiply a checksum with."""
    result, square, exponent = 1 << 31, 1 << 30, 8 * nbytes
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square, exponent = _multiply(square, square), exponent >> 1
    return result


def join(first: int, second: int, second_bytes: int) -> int:
    """zlib.crc32(a + b) from first = zlib.crc32(a), second = zlib.crc32(b) and the length of b.

    A CRC is the remainder of a polynomial division, so a's is multiplied with x^(8 len b) and added to b's.
    """
    return _multiply(first, _shift(second_bytes)) ^ second
