"""The preset on-demand: everything on the device; missing experts are fetched, the least recently used go."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.policies.options import Choice, Preset
from pipeline.policies.parts import changes, experts_per_layer, unused_tiles_note, whole_experts
from pipeline.policies.view import IntArray, Plan, Routing, View


class OnDemand(Preset):
    """All experts are computed on the device. A cache of whole experts keeps, in this order: the layer's
    active experts that it holds, its active experts that are missing (most rows first), and the others by
    how recently they were used. Active experts beyond the cache stream through staging and are not kept.
    Ties go to the smaller expert index, and between layers to the earlier one.

    The cache starts empty: nothing is known yet, and what it holds then follows from the routing alone."""

    name: ClassVar[str] = "on-demand"
    options = (
        Choice(
            name="scope",
            help="one cache for each layer, evenly shared, or one cache over all layers",
            default="layer",
            choices=("layer", "global"),
        ),
    )

    def __init__(self, *, scope: str) -> None:
        self._per_layer = scope == "layer"
        self._clock = 0
        self._last_used: NDArray[np.int64] | None = None  # [L, E]: clock of the last use; 0: never

    def notes(self, view: View) -> tuple[str, ...]:
        return unused_tiles_note(self.name, view)

    def placement(self, view: View) -> IntArray:
        return np.zeros((view.shape.layers, view.shape.experts), dtype=np.int32)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        shape = view.shape
        if self._last_used is None:
            self._last_used = np.zeros((shape.layers, shape.experts), dtype=np.int64)
        workload = routing.workload(shape.experts)
        active = workload > 0
        self._clock += 1
        self._last_used[layer, active] = self._clock
        cut = np.where(active, shape.tiles, 0).astype(np.int32)
        if not (active & (view.target[layer] == 0)).any():
            return Plan(cut)

        first, last = (layer, layer + 1) if self._per_layer else (0, shape.layers)
        held = view.target[first:last] > 0
        now_active = np.zeros_like(held)
        now_active[layer - first] = active
        # every rank is a number that grows with the reason to keep: held and active ones above all, then
        # missing ones by rows, then the rest by recency
        missing = np.zeros_like(held)
        missing[layer - first] = active & ~held[layer - first]
        rank = self._last_used[first:last].copy()
        rank[missing] = self._clock + workload[missing[layer - first]]
        rank[now_active & held] = np.iinfo(np.int64).max
        candidates = np.flatnonzero(held | missing)
        order = candidates[np.argsort(-rank.ravel()[candidates], kind="stable")]

        if self._per_layer:
            budget = int(experts_per_layer(shape, view.capacity)[layer])
        else:
            budget = whole_experts(shape, view.capacity)
        wanted = np.zeros(held.shape, dtype=np.int32)
        wanted.ravel()[order[:budget]] = shape.tiles
        return Plan(cut, changes(view.target[first:last], wanted, first))
