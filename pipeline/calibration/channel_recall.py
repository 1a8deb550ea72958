"""FloE's predictor inside an expert (2025, section 3.3.2): the next layer's up matrix on this layer's x tells
early which of its channels will be kept. Here is measured how well, on decoded tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray
from pipeline.calibration.magnitudes import DecodeObserver, Up
from pipeline.engine.driver import LayerDecision
from pipeline.policies.view import ModelShape

KEPT = 0.2  # share of an expert's channels: those with the largest |u|


class ChannelRecall(DecodeObserver):
    """Compares the channels that are named early with those that are kept."""

    def __init__(self, shape: ModelShape, up: Up, every: int = 1) -> None:
        super().__init__(every)
        self._up = up
        self._before: FloatArray  # x of the layer before
        self._found, self._wanted = np.zeros((2, shape.layers))

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        if not self.counts:
            return
        layer, active = decision.layer, decision.gated.routing.active
        ends = active.offsets.tolist()
        if layer:
            for expert, start, end in zip(active.experts.tolist(), ends, ends[1:], strict=False):
                rows = active.rows[start:end]
                early, own = (_largest(self._up(layer, expert, of[rows])) for of in (self._before, x))
                self._found[layer] += np.count_nonzero(early & own)
                self._wanted[layer] += np.count_nonzero(own)
        self._before = x.copy()

    def measured(self) -> dict[str, Any]:
        """`Findings.channels`: by layer from the second on, the share of the kept channels that are among as
        many named early; empty without any."""
        if not self._wanted[1:].all() or len(self._wanted) < 2:
            return {}
        return {"kept": KEPT, "recall": (self._found[1:] / self._wanted[1:]).tolist()}


def _largest(u: FloatArray) -> NDArray[np.bool_]:
    """bool [n, channels]."""
    number = max(1, round(KEPT * u.shape[1]))
    kept: NDArray[np.bool_] = np.zeros(u.shape, np.bool_)
    np.put_along_axis(kept, np.argpartition(-np.abs(u), number - 1, axis=1)[:, :number], True, axis=1)
    return kept
