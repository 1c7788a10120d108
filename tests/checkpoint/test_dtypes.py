"""Values to bytes and back. bfloat16 rounds as IEEE 754 says (to nearest, ties to even)."""

from __future__ import annotations

import numpy as np
import pytest

from mpshard.checkpoint.dtypes import BLOCK, SIZES, code_of, decode, encode, is_exact


def to_bf16(values: np.ndarray) -> np.ndarray:
    raw = np.empty(2 * values.size, np.uint8)
    encode(values, "BF16", raw)
    return raw.view(np.uint16)


# value as float32 bits -> bfloat16 bits, by hand: the lower half is over, under or exactly half a unit.
@pytest.mark.parametrize(("bits", "expected"), [
    (0x3F800000, 0x3F80), (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x3F807FFF, 0x3F80),
    (0x80000000, 0x8000), (0x7F800000, 0x7F80), (0xFF800000, 0xFF80), (0x7F7FFFFF, 0x7F80), (0x7F800001, 0x7FC0),
    (0xFFFFFFFF, 0xFFFF), (0x00000001, 0x0000), (0x00018000, 0x0002)])
def test_rounding_to_bfloat16(bits, expected):
    assert to_bf16(np.array([bits], np.uint32).view(np.float32))[0] == expected


def test_bfloat16_as_ml_dtypes_has_it():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(0).integers(0, 2**32, 3 * BLOCK + 5, np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(to_bf16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    held = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_bf16(held), held.view(np.uint16))


@pytest.mark.parametrize("code", ["F64", "F32", "F16", "BF16", "I64", "U8"])
def test_values_that_fit_come_back(code):
    values = np.array([0, 1, 2, 96, 127], np.float32)
    raw = np.empty(SIZES[code] * values.size, np.uint8)
    encode(values, code, raw)
    np.testing.assert_array_equal(decode(raw, code), values)


def test_codes_and_what_survives_them():
    assert [code_of(t) for t in (np.float64, np.float32, np.float16, np.int64)] == ["F64", "F32", "F16", "I64"]
    with pytest.raises(ValueError, match="complex64"):
        code_of(np.complex64)
    assert is_exact(np.float32, "F32") and is_exact(np.float16, "F32") and is_exact(np.float64, "F64")
    assert not is_exact(np.float32, "BF16") and not is_exact(np.float32, "F16") and not is_exact(np.float64, "F32")
