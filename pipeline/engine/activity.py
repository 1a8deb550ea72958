"""What happened to each expert, for those who watch an engine: an observer that is idle while nobody does."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.engine.driver import LayerDecision

WATCHED_SECONDS = 3.0  # after the last look, so long is recorded on
MOST_LAYERS = 1 << 16  # between two looks; older ones are forgotten


class ActivityObserver:
    """Sums by expert, since the first look. The engine's thread records each layer's decision, and the event
    loop adds them up. The sums are int32 [L, E]: `used`, the steps in which the expert was active; `device`,
    its tiles that the device computed; `demanded`, those of them that had to be fetched first."""

    def __init__(self, layers: int, experts: int, tiles: int) -> None:
        self.tiles = tiles
        self.used, self.device, self.demanded = np.zeros((3, layers, experts), np.int32)
        self._until = 0.0
        self._layers: deque[tuple[int, IntArray, IntArray, IntArray]] = deque(maxlen=MOST_LAYERS)

    def look(self) -> None:
        """Add up what was recorded, and record on."""
        self._until = time.monotonic() + WATCHED_SECONDS
        taken = [self._layers.popleft() for _ in range(len(self._layers))]
        if not taken:
            return
        layers = np.repeat([layer for layer, *_ in taken], [len(experts) for _, experts, *_ in taken])
        experts, cut, resident = (np.concatenate([entry[part] for entry in taken]) for part in (1, 2, 3))
        where = layers * self.used.shape[1] + experts
        missing = np.maximum(cut - resident, 0)
        for sums, values in ((self.used, None), (self.device, cut), (self.demanded, missing)):
            sums += np.bincount(where, values, sums.size).astype(np.int32).reshape(sums.shape)

    def probes(self, layer: int) -> tuple[int, ...]:
        return ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        if self._until and time.monotonic() > self._until:
            self._until = 0.0
            self._layers.clear()

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        if self._until:
            experts = decision.gated.routing.active.experts
            # copies: the decision's arrays are valid until the layer has been computed
            cut, resident = decision.cut.take(experts), decision.resident.take(experts)
            self._layers.append((decision.layer, experts.copy(), cut, resident))

    def end(self) -> None:
        pass
