"""What the layers of a traced step need, made for all of them at once, which is quicker than one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.arrays import FloatArray, one_row
from pipeline.models.routing import Router
from pipeline.policies.view import Active, Routing
from pipeline.traces.trace import TracedStep

KEPT_ROWS = 128  # of a step up to which they are kept with it, for the next replay


def inputs_of(step: TracedStep, router: Router) -> StepInputs:
    """The inputs of a step, those of an earlier replay where they were kept."""
    kept = vars(step)
    found: StepInputs | None = kept.get("inputs")
    if found is None or found.router != router:
        found = StepInputs(step, router)
        if len(step.sequences) <= KEPT_ROWS:
            kept["inputs"] = found
    return found


class StepInputs:
    """The routers' logits of a step as float32, and the choices of those that were asked ahead."""

    def __init__(self, step: TracedStep, router: Router) -> None:
        self.router = router
        self._layers = step.layers
        self._ahead: dict[int, list[tuple[FloatArray, Routing]]] = {}  # by distance, then by layer
        known = [layer.logits for layer in step.layers if layer.logits is not None]
        self.own: list[FloatArray | None]  # [R, E] of each layer
        if len(known) == len(step.layers):
            self.own = list(np.array(known, np.float32))
        else:
            every = (layer.logits for layer in step.layers)
            self.own = [None if each is None else each.astype(np.float32) for each in every]
        routings = [layer.router_routing for layer in step.layers]
        if len(step.sequences) == 1 and "active" not in vars(routings[0]):
            _sort_together(routings)

    def ahead(self, layer: int, distance: int) -> tuple[FloatArray, Routing] | None:
        """The router of a later layer, so many behind this one, on this layer's x: its logits [R, E] and its
        choice. None where the trace has none."""
        found = self._ahead.get(distance)
        if found is None:
            found = self._ahead[distance] = self._routed(distance)
        return found[layer] if layer < len(found) else None

    def _routed(self, distance: int) -> list[tuple[FloatArray, Routing]]:
        traced = [layer.predictions for layer in self._layers if len(layer.predictions) >= distance]
        if not traced:
            return []
        logits = np.array([predictions[distance - 1] for predictions in traced], np.float32)  # [l, R, E]
        routed = self.router(logits.reshape(-1, logits.shape[2]))
        parts = (each.reshape(*logits.shape[:2], -1) for each in (routed.experts, routed.weights))
        routings = [Routing(*part) for part in zip(*parts, strict=True)]
        if logits.shape[1] == 1:
            _sort_together(routings)
        return list(zip(logits, routings, strict=True))


def _sort_together(routings: Sequence[Routing]) -> None:
    """Compute `active` and `total_weight` of routings of one row each, all of the same k, in a fraction of
    the time that each takes alone."""
    weights = np.concatenate([routing.weights for routing in routings])
    if np.count_nonzero(weights) < weights.size:
        return
    experts = np.concatenate([routing.experts for routing in routings])
    order = experts.argsort(axis=1, kind="stable")
    order += np.arange(0, experts.size, experts.shape[1])[:, None]
    every, first, once = one_row(experts.shape[1])
    sums = weights.sum(axis=1).tolist()
    ranked = experts.take(order)
    sorted_rows = zip(ranked, weights.take(order), ranked.astype(np.intp), strict=True)
    for routing, (used, by_expert, index), total in zip(routings, sorted_rows, sums, strict=True):
        known = vars(routing)
        known["active"] = tuple.__new__(
            Active, (used, every, first, by_expert, once, index)
        )  # in half the time
        known["total_weight"] = total
