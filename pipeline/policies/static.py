"""Presets whose residency never changes: all-host, layerwise and fiddler."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pipeline.errors import PolicyError
from pipeline.policies.options import Preset
from pipeline.policies.parts import popular_placement, unused_tiles_note, whole_experts
from pipeline.policies.view import IntArray, Plan, Routing, View


class AllHost(Preset):
    """The workers compute every expert straight from the store; nothing is ever moved."""

    name: ClassVar[str] = "all-host"
    uses_device: ClassVar[bool] = False

    def placement(self, view: View) -> IntArray:
        return np.zeros((view.shape.layers, view.shape.experts), dtype=np.int32)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        return Plan(np.zeros(view.shape.experts, dtype=np.int32))


class Layerwise(Preset):
    """The first layers' experts on the device, the others on the host, as llama.cpp and KTransformers place
    them. The layer in which the cache ends is filled by whole experts. Each expert is computed where its
    tiles are, so nothing is fetched on demand, not even while the placement is still loading."""

    name: ClassVar[str] = "layerwise"

    def notes(self, view: View) -> tuple[str, ...]:
        return unused_tiles_note(self.name, view)

    def placement(self, view: View) -> IntArray:
        shape = view.shape
        target = np.zeros(shape.layers * shape.experts, dtype=np.int32)
        target[: whole_experts(shape, view.capacity)] = shape.tiles
        return target.reshape(shape.layers, shape.experts)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        # the smaller of the two: tiles beyond a target are about to go
        return Plan(np.minimum(view.residency[layer], view.target[layer]).astype(np.int32))


class Fiddler(Preset):
    """Fiddler (PAPERS.md, baselines): the popular experts stay resident, and a missing one is computed on
    the host where that takes less time than moving it and computing it on the device:

        t_host(w) < transfer + t_device(w)    for w rows

    A fetched expert passes through staging and is not kept. An expert whose placement is still landing
    counts as missing, with only its missing tiles to move."""

    name: ClassVar[str] = "fiddler"
    needs_costs: ClassVar[bool] = True

    def notes(self, view: View) -> tuple[str, ...]:
        notes = unused_tiles_note(self.name, view)
        kept = whole_experts(view.shape, view.capacity)
        if 0 < kept < view.shape.layers * view.shape.experts and not view.popularity.any():
            notes += (
                f"{self.name}: no routing has been counted yet, so each layer's first experts are resident, "
                "not its popular ones; set the policy again once some text has run",
            )
        return notes

    def placement(self, view: View) -> IntArray:
        return popular_placement(view)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        if view.costs is None:
            raise PolicyError(f"policy {self.name} plans by costs, and none were measured or given (--costs)")
        tiles = view.shape.tiles
        workload = routing.workload(view.shape.experts)
        missing = tiles - view.residency[layer]
        host = view.costs.host_seconds(workload, tiles)
        device = view.costs.link_seconds(missing) + view.costs.device_seconds(workload, tiles)
        return Plan(np.where((missing > 0) & (host < device), 0, tiles).astype(np.int32))
