"""Gate parts: they decide which of the router's experts a token needs."""

from __future__ import annotations

from math import inf
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray
from pipeline.policies.calibration import Calibration, drop_limits
from pipeline.policies.options import Number, Option
from pipeline.policies.parts import Gate
from pipeline.policies.view import Routing, View


class OwnGate(Gate):
    """The model's own routing, unchanged."""

    name: ClassVar[str] = "own"
    help: ClassVar[str] = "every expert that the model's router chose"

    def apply_gate(self, layer: int, routing: Routing, view: View) -> Routing:
        return routing


class PreGate(OwnGate):
    """Pre-gated MoE's order, AdapMoE's baseline (its figure 8): while one token at a time is decoded, the
    layer before decides a layer's experts and weights, and the layer's own router is not run; so all of them
    can be fetched meanwhile, none in vain. The first layer decides for itself. Pre-gated MoE trains routers
    for this; here each layer's own router is applied one layer early, so that the model changes more."""

    name: ClassVar[str] = "pre-gated"
    help: ClassVar[str] = "Pre-gated MoE's: the layer before decides, by the layer's router on its input"
    exact = by_row = False
    pre_gated = True


class AdaptiveGate(Gate):
    """AdapMoE's gate (section 4.2, equation 8): a token uses its first expert alone where

        (1 - alpha)^2 * s_l <= T

    with alpha the first expert's share of the two weights, s_l the layer's sensitivity and T the threshold.
    Of more than two experts, the smallest weights are dropped as long as (their share of the sum)^2 * s_l is
    at most T; the largest always stays. A dropped expert keeps its place with a weight of 0; those that are
    kept are rescaled to the sum of all."""

    name: ClassVar[str] = "adaptive"
    help: ClassVar[str] = "AdapMoE's: small weights are dropped where the layer is not sensitive to it"
    exact = False
    needs_calibration = True
    without: ClassVar[str] = "gate=own"
    options: ClassVar[tuple[Option, ...]] = (
        Number(
            name="threshold",
            help="T of (dropped share)^2 * sensitivity <= T; by default the calibration's",
            default=None,
            low=0,
            high=10**9,
            whole=False,
        ),
    )

    def __init__(self, *, threshold: float | None) -> None:
        self._threshold = threshold
        # s_l by layer and T, of a calibration
        self._rule: tuple[Calibration | None, list[float], float] | None = None

    def missing(self, calibration: Calibration | None) -> str:
        if calibration is not None and calibration.sensitivity is None:
            return "a calibration with sensitivities (of families with a backbone of Tandem's own)"
        if calibration is not None and calibration.threshold is None and self._threshold is None:
            return "a calibration with a threshold"
        return super().missing(calibration)

    def limits(self, view: View) -> list[float]:
        return drop_limits(*self._known(view))

    def apply_gate(self, layer: int, routing: Routing, view: View) -> Routing:
        if view.phase != "decode":
            return routing
        sensitivities, limit = self._known(view)
        weights = _gated(routing.weights, sensitivities[layer], limit)
        return routing if weights is None else Routing(routing.experts, weights)

    def _known(self, view: View) -> tuple[list[float], float]:
        """The layers' sensitivities and the threshold."""
        calibration = view.calibration
        if self._rule is None or self._rule[0] is not calibration:
            assert calibration is not None
            assert calibration.sensitivity is not None
            limit = calibration.threshold if self._threshold is None else self._threshold
            assert limit is not None
            self._rule = calibration, calibration.sensitivity.tolist(), limit
        return self._rule[1:]


def drop_shares(weights: FloatArray) -> NDArray[np.float64]:
    """The share of each token's weight [R, k] that a gate must be allowed to drop for an expert to be
    dropped: that of the expert and of all before it, the smallest first, of equal ones the last. The largest
    is never dropped, nor any of a token without weight: inf."""
    wide = weights.astype(np.float64)
    total = wide.sum(axis=1, keepdims=True)
    order = wide.shape[1] - 1 - np.argsort(wide[:, ::-1], axis=1, kind="stable")
    running = np.take_along_axis(wide, order, axis=1).cumsum(axis=1) / np.where(total > 0, total, 1)
    running[:, -1] = inf
    running[total[:, 0] <= 0] = inf
    shares = np.empty_like(running)
    np.put_along_axis(shares, order, running, axis=1)
    return shares


def _gated(weights: FloatArray, sensitivity: float, limit: float) -> FloatArray | None:
    """Returns the tokens' weights, float32 [R, k], with the smallest ones dropped, of equal ones the last;
    None where none is dropped, as mostly. Row by row: a decode step has few, each of a handful of numbers."""
    answer: FloatArray | None = None
    totals = weights.sum(axis=1, dtype=np.float64).tolist()
    for row, (values, total) in enumerate(zip(weights.tolist(), totals, strict=True)):
        kept, running = values.copy(), 0.0
        for place in sorted(range(len(values)), key=lambda place: (values[place], -place))[:-1]:
            running += values[place]
            share = running / total if total > 0 else inf
            if share * share * sensitivity > limit:
                break
            kept[place] = 0.0
        if kept != values:
            answer = weights.copy() if answer is None else answer
            # the largest is kept: where the sums are equal nothing that counts was dropped
            left = float(np.add.reduce(np.array(kept)))
            answer[row] = kept if left == total else [value * (total / left) for value in kept]
    return answer


GATES: tuple[type[Gate], ...] = (OwnGate, AdaptiveGate, PreGate)
