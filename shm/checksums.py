"""The checksums of a store's layers, compared on all cores: of a store in memory and of one on disk."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

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
    """For a person: "layer 3", "layers 0, 2, 5"; of many the first ones."""
    shown = ", ".join(str(layer) for layer in layers[:8])
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{more}"
