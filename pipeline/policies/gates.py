"""Gate parts: they decide which of the router's experts a token needs."""

from __future__ import annotations

from math import inf
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray
from pipeline.errors import PolicyError
from pipeline.policies.calibration import Calibration, drop_limits
from pipeline.policies.options import Choice, Option, Real
from pipeline.policies.parts import Gate
from pipeline.policies.view import Routing, View
from protocol.program import COMMAND

FEW_ROWS = 8  # up to which plain numbers are quicker than arrays


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
    exact = False
    pre_gated = True


PHASE = Choice(
    name="phase",
    help="where experts are dropped: while one token at a time is decoded, or in prompts too",
    default="decode",
    choices=("decode", "all"),
)


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
        Real(
            name="threshold",
            help="T of (dropped share)^2 * sensitivity <= T; by default the calibration's",
            default=None,
            low=0.0,
            high=1e9,
        ),
        PHASE,
    )

    def __init__(self, *, threshold: float | None, phase: str) -> None:
        self._threshold = threshold
        self._prompts_too = phase == "all"
        # s_l by layer and T, of a calibration
        self._rule: tuple[Calibration | None, list[float], float] | None = None

    def missing(self, calibration: Calibration | None) -> str:
        if calibration is not None and calibration.sensitivity is None:
            return "a calibration with sensitivities"
        if calibration is not None and calibration.threshold is None and self._threshold is None:
            return "a calibration with a threshold"
        return super().missing(calibration)

    def limits(self, view: View) -> list[float]:
        return drop_limits(*self._known(view))

    def apply_gate(self, layer: int, routing: Routing, view: View) -> Routing:
        if view.phase != "decode" and not self._prompts_too:
            return routing
        sensitivities, limit = self._known(view)
        sensitivity = sensitivities[layer]
        if len(routing.weights) > FEW_ROWS:
            return Routing(routing.experts, _gate_rows(routing.weights, sensitivity, limit))
        rows = routing.weights.tolist()
        gated = [_gate_row(row, sensitivity, limit) for row in rows]
        if not any(gated):
            return routing
        kept = [new or row for new, row in zip(gated, rows, strict=True)]
        return Routing(routing.experts, np.array(kept, np.float32))

    def _known(self, view: View) -> tuple[list[float], float]:
        """The rule in plain numbers, which are fast for one token."""
        calibration = view.calibration
        if self._rule is None or self._rule[0] is not calibration:
            if absent := self.missing(calibration):
                raise PolicyError(f"gate {self.name} needs {absent}: run {COMMAND} calibrate --text FILE")
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


def _gate_row(weights: list[float], sensitivity: float, limit: float) -> list[float]:
    """One token's weights with the smallest ones dropped, of equal ones the last; empty where none is
    dropped."""
    total = sum(weights)
    if total <= 0:
        return []
    least = min(weights) / total
    if least * least * sensitivity > limit:  # as mostly
        return []
    kept = weights.copy()
    dropped = 0.0
    for slot in sorted(reversed(range(len(weights))), key=weights.__getitem__)[:-1]:
        more = dropped + weights[slot] / total
        if more * more * sensitivity > limit:
            break
        dropped = more
        kept[slot] = 0.0
    if dropped == 0:
        return []
    scale = total / sum(kept)
    return [weight * scale for weight in kept]


def _gate_rows(weights: FloatArray, sensitivity: float, limit: float) -> FloatArray:
    """The same for many tokens, float32 [R, k]."""
    wide = weights.astype(np.float64)
    total = wide.sum(axis=1, keepdims=True)
    shares = drop_shares(weights)
    last = shares == inf
    drop = ~last & (np.where(last, 0, shares) ** 2 * sensitivity <= limit)
    kept = np.where(drop, 0, wide)
    left = kept.sum(axis=1, keepdims=True)
    # where the sums are equal only weights of 0 were dropped: such a row keeps its bits
    rescaled = kept * (total / np.where(left > 0, left, 1))
    return np.where(left == total, weights, rescaled).astype(np.float32)


GATES: tuple[type[Gate], ...] = (OwnGate, AdaptiveGate, PreGate)
