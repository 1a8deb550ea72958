"""Joins the crc32 values of parts, so that several cores can sum one range.

A crc32 is a polynomial over GF(2), modulo the one below; bit 31 is the coefficient of x^0. Appending n bytes
multiplies the earlier polynomial by x^(8n) and adds the appended one.
"""

from __future__ import annotations

from functools import lru_cache

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31


def join_crc32(first: int, second: int, length: int) -> int:
    """The crc32 of a + b, where `first` is that of a, and `second` that of b, which has `length` bytes."""
    return _times(_shift(length), first) ^ second


@lru_cache(maxsize=64)  # the parts of a store have few lengths
def _shift(length: int) -> int:
    """x^(8 * length)."""
    power, square = ONE, ONE >> 8
    while length:
        if length & 1:
            power = _times(power, square)
        square = _times(square, square)
        length >>= 1
    return power


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (POLYNOMIAL if b & 1 else 0)
    return product
