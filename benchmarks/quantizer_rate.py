"""Measures how fast experts are encoded on all cores from matrices in memory."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.checkpoint.chunks import expert_chunks
from pipeline.checkpoint.reader import RawTensor
from pipeline.models.architecture import ExpertRows, TensorRows
from shm.layout import BF16, StoreLayout

MATRICES_BYTES = 1 << 28  # of bf16 matrices, encoded again and again
SECONDS = 2.0
CORES = len(os.sched_getaffinity(0))


class Matrices:
    """Experts' matrices in memory, as a source of rows of parts."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        rng = np.random.Generator(np.random.SFC64(0))
        self.experts = max(1, MATRICES_BYTES // (6 * hidden * intermediate))
        self.shape = (self.experts, 3 * intermediate, hidden)
        data = np.empty(2 * self.experts * 3 * intermediate * hidden, np.uint8)
        BF16().fill_random(rng, 0, 0, hidden**-0.5, data)
        self._numbers = data.view(np.uint16)

    def parts(self, expert: int) -> ExpertRows:
        """Gate, up and down of an expert, each a part that begins at a number of its own."""
        _, wide, hidden = self.shape
        intermediate = wide // 3
        first = expert * wide
        return (
            TensorRows("matrices", (self.experts * wide, hidden), first, intermediate),
            TensorRows("matrices", (self.experts * wide, hidden), first + intermediate, intermediate),
            # The same bytes with rows of I numbers: they begin at row 2 H of the expert's 3 H.
            TensorRows(
                "matrices",
                (self.experts * 3 * hidden, intermediate),
                3 * hidden * expert + 2 * hidden,
                hidden,
            ),
        )

    def rows(self, part: TensorRows, lo: int, hi: int) -> RawTensor:
        bits = self._numbers.reshape(part.shape)[part.first + lo : part.first + hi]
        return RawTensor("BF16", bits.shape, bits)


def quantizer_rate(layout: StoreLayout) -> float:
    """Bytes of bf16 matrices a second, on all cores."""
    shape = layout.shape
    matrices = Matrices(shape.hidden, shape.intermediate)
    store = np.zeros((matrices.experts, layout.expert_stride), np.uint8)
    heads = np.zeros((matrices.experts, layout.head_stride), np.uint8)
    with ThreadPoolExecutor(CORES) as pool, ThreadPoolExecutor(1) as downs:

        def once() -> None:
            tasks = [
                pool.submit(chunk)
                for expert, target in enumerate(zip(store, heads, strict=True))
                for chunk in expert_chunks(matrices, downs, layout, matrices.parts(expert), *target)
            ]
            for task in tasks:
                task.result()

        once()
        start, rounds = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            once()
            rounds += 1
        seconds = time.perf_counter() - start
    return rounds * matrices.experts * 6 * shape.hidden * shape.intermediate / seconds
