"""What a gate that drops small weights leaves of the decoded tokens' experts, and of their predictions, for
every limit of the dropped share: so cache sizes can follow any threshold (AdapMoE, section 4.4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.policies.calibration import Floats
from pipeline.policies.gates import drop_shares
from pipeline.policies.view import ModelShape, Routing

STEPS = 65  # limits from 0 to 1
LIMITS = np.linspace(0, 1, STEPS)


class DropTables:
    """Counts of decoded tokens."""

    def __init__(self, shape: ModelShape, predictors: tuple[str, ...]) -> None:
        self._counts = np.arange(shape.top_k + 1)
        self._tokens = np.zeros((shape.layers, STEPS, shape.top_k + 1))
        self._hits = {name: np.zeros((shape.layers, STEPS)) for name in predictors}

    def used(self, layer: int, routing: Routing) -> None:
        """The experts of some tokens, by the layer's own router."""
        kept = (_shares(routing)[:, :, None] > LIMITS).sum(axis=1)  # [R, G]
        self._tokens[layer] += (kept[:, :, None] == self._counts).sum(axis=0)

    def predicted(self, name: str, layer: int, named: Routing, routing: Routing) -> None:
        """A prediction of the same tokens: an expert is found as long as both keep it."""
        found = routing.experts[:, :, None] == named.experts[:, None, :]
        until = np.minimum(_shares(routing)[:, :, None], _shares(named)[:, None, :])[found]
        self._hits[name][layer] += (until[:, None] > LIMITS).sum(axis=0)

    def kept(self) -> Floats:
        """`Calibration.kept`."""
        shares: Floats = (self._tokens / self._tokens.sum(axis=2, keepdims=True)).astype(np.float32)
        return shares

    def accuracy(self) -> dict[str, Floats]:
        """`Calibration.gated_accuracy`."""
        asked = np.maximum(self._tokens @ self._counts, 1)
        return {name: (hits / asked).astype(np.float32) for name, hits in self._hits.items()}


def _shares(routing: Routing) -> NDArray[np.float64]:
    """As `drop_shares`; an expert without weight is never kept."""
    return np.where(routing.weights == 0, -1, drop_shares(routing.weights))
