"""Work for an expert worker on the small store, and the expected answers."""

from __future__ import annotations

import brute_force
import numpy as np
from child_harness import SHAPE, weights_of

from protocol.messages import Work

Item = tuple[int, int, int, list[int]]  # expert, lo, hi, rows


def make_work(seq: int, layer: int, items: list[Item], rows: int, seed: int = 0) -> Work:
    random = np.random.default_rng(seed)
    chosen = [row for item in items for row in item[3]]
    return Work(
        seq=seq,
        layer=layer,
        items=np.array([item[:3] for item in items], np.int32).reshape(-1, 3),
        offsets=np.cumsum([0] + [len(item[3]) for item in items]).astype(np.int32),
        rows=np.array(chosen, np.int32),
        weights=random.uniform(-1, 1, len(chosen)).astype(np.float32),
        x=random.standard_normal((rows, SHAPE.hidden)).astype(np.float32),
    )


def expected(work: Work, format: str = "f32") -> brute_force.Expected:
    zeros = np.zeros(work.x.shape)
    total = brute_force.Expected(zeros, zeros + 1e-30)
    for index, (expert, lo, hi) in enumerate(work.items.tolist()):
        channels = slice(lo * SHAPE.tile, hi * SHAPE.tile)
        gate, up, down = weights_of(work.layer, expert)
        for place in range(work.offsets[index], work.offsets[index + 1]):
            row = slice(work.rows[place], work.rows[place] + 1)
            parts = gate[channels], up[channels], down[:, channels]
            one = brute_force.expert(*parts, work.x[row], format).weighted(work.weights[place : place + 1])
            y, bound = np.zeros_like(zeros), np.zeros_like(zeros)
            y[row], bound[row] = one.y, one.bound * 1.01
            total += brute_force.Expected(y, bound)
    return total


GOOD = make_work(100, 0, [(1, 0, 3, [0, 2]), (2, 4, 7, [1])], rows=3)
