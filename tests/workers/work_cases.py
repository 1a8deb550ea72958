"""Work for an expert worker on the small store, and the expected answers."""

from __future__ import annotations

from dataclasses import dataclass

import brute_force
import numpy as np
from child_harness import SHAPE, weights_of

from protocol.messages import Work
from shm.descriptor import GENERATION, Descriptor, describe, head_of
from shm.formats import Float32
from shm.mask import DENSE, Mask, Tally
from workers.kernels.native import WorkKernel

Item = tuple[int, int, int, list[int]]  # expert, lo, hi, rows


@dataclass(frozen=True, eq=False)
class Case:
    """A Work's parts, which need not fit each other."""

    layer: int
    items: object  # [n, 3]
    offsets: object
    rows: object
    weights: object
    x: Float32
    mask: Mask = DENSE
    seq: int = 0

    @property
    def descriptor(self) -> Descriptor:
        lists = self.items, self.offsets, self.rows, self.weights
        return describe(self.layer, *lists, len(self.x), self.mask, self.seq)  # type: ignore[arg-type]

    def message(self, generation: int) -> Work:
        descriptor = self.descriptor
        head_of(descriptor)[GENERATION] = generation
        return Work(descriptor, self.x)

    def computed(self, kernel: WorkKernel) -> tuple[Float32, Tally]:
        """y and tally by C."""
        y = np.full(self.x.shape, np.nan, np.float32)  # of a Work before
        return y, kernel.compute(self.descriptor, np.ascontiguousarray(self.x), y)


def make_work(seq: int, layer: int, items: list[Item], rows: int, seed: int = 0) -> Case:
    random = np.random.default_rng(seed)
    chosen = [row for item in items for row in item[3]]
    return Case(
        layer,
        np.array([item[:3] for item in items], np.int32).reshape(-1, 3),
        np.cumsum([0] + [len(item[3]) for item in items]).astype(np.int32),
        np.array(chosen, np.int32),
        random.uniform(-1, 1, len(chosen)).astype(np.float32),
        random.standard_normal((rows, SHAPE.hidden)).astype(np.float32),
        seq=seq,
    )


def expected(work: Case, format: str = "f32") -> brute_force.Expected:
    zeros = np.zeros(work.x.shape)
    total = brute_force.Expected(zeros, zeros + 1e-30)
    for index, (expert, lo, hi) in enumerate(np.asarray(work.items).tolist()):
        channels = slice(lo * SHAPE.tile, hi * SHAPE.tile)
        gate, up, down = weights_of(work.layer, expert)
        for place in range(work.offsets[index], work.offsets[index + 1]):  # type: ignore[index]
            row = slice(work.rows[place], work.rows[place] + 1)  # type: ignore[index]
            weights = work.weights[place : place + 1]  # type: ignore[index]
            parts = gate[channels], up[channels], down[:, channels]
            one = brute_force.expert(*parts, work.x[row], format).weighted(weights)
            y, bound = np.zeros_like(zeros), np.zeros_like(zeros)
            y[row], bound[row] = one.y, one.bound * 1.01
            total += brute_force.Expected(y, bound)
    return total


GOOD = make_work(100, 0, [(1, 0, 3, [0, 2]), (2, 4, 7, [1])], rows=3)
