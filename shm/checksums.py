"""The checksums of a store's layers, summed and compared on all cores.

A crc32 is a polynomial over GF(2), modulo the one below; bit 31 is the coefficient of x^0. Appending n bytes
multiplies the earlier polynomial by x^(8n) and adds the appended one: so parts are joined.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import lru_cache

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31


def join_crc32(first: int, second: int, length: int) -> int:
    """The crc32 of a + b, where `first` is that of a, and `second` that of b, which has `length` bytes."""
    return _times(_shift(length), first) ^ second


@lru_cache(maxsize=64)  # the parts of a store have few lengths
def _shift(length: int) -> int:
    """Returns the polynomial x^(8 * length), by which a checksum moves on over `length` bytes."""
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


REPORT_SECONDS = 0.1

Parts = Callable[[int], Iterator[memoryview]]


def damaged_layers(
    expected: Sequence[int], parts: Parts, progress: Callable[[int], None] | None = None
) -> list[int]:
    """The layers with another crc32 than expected.

    `parts(layer)` yields a layer's bytes in order, in another thread; `progress` is called in this thread
    with the bytes summed so far, about ten times a second and at the end. An exception of either ends the
    comparison and is raised here.
    """
    done = [0] * len(expected)
    stopping = threading.Event()

    def crc32(layer: int) -> int:
        value = 0
        for part in parts(layer):
            value = zlib.crc32(part, value)
            done[layer] += len(part)
            if stopping.is_set():
                break
        return value

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = [pool.submit(crc32, layer) for layer in range(len(expected))]
        waiting = set(sums)
        try:
            while waiting:
                finished, waiting = wait(waiting, REPORT_SECONDS, FIRST_EXCEPTION)
                for one in finished:
                    one.result()
                if progress is not None:
                    progress(sum(done))
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [layer for layer, one in enumerate(sums) if one.result() != expected[layer]]


def name_layers(layers: list[int]) -> str:
    """Name layers for a person: "layer 3", "layers 0, 2, 5"; of many the first ones."""
    shown = ", ".join(str(layer) for layer in layers[:8])
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{more}"
