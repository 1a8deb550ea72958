"""The seconds of a layer's active experts on either side, from the view's costs: one accounting for every
part that plans by costs. The replay's clock (`pipeline/replay/machine.py`) counts the same parts."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from pipeline.arrays import IntArray
from pipeline.policies.costs import Costs, SecondsTable
from pipeline.policies.view import Active, View


class ActiveCosts(NamedTuple):
    """A layer's active experts and their costs, all lists in the same order."""

    rows: list[int]
    missing: list[int]  # tiles
    link: list[float]  # seconds to fetch the missing tiles; 0 without any
    device: list[float]  # seconds for all tiles on the device, without transfers
    host: list[float]  # seconds for all tiles on the host
    exchange: float  # seconds of a host share beside its experts: the Work there and the Partial back
    launch: float  # seconds of a device share beside its experts

    @property
    def for_queue(self) -> tuple[list[float], list[float], list[float], list[int], float, float]:
        """The arguments of `balance.two_ended`."""
        return self.link, self.device, self.host, self.rows, self.exchange, self.launch


class LayerSeconds:
    """Looks up the costs of active experts.

    DALI's equation 9 bounds what the device holds at once. A missing tile passes through a staging slot,
    which is free again once the tile has been computed, so that any number of experts fits beside the
    resident ones, also with an empty cache. Without staging none does: its transfer would never end."""

    def __init__(self) -> None:
        self._costs: Costs | None = None  # of the two tables
        self._device: SecondsTable
        self._host: SecondsTable

    def of(self, active: Active, residency: IntArray, view: View) -> ActiveCosts:
        """`residency` [E]: the layer's resident tiles. At least one expert is active."""
        costs, tiles = view.costs, view.shape.tiles
        assert costs is not None
        if self._costs is not costs:
            self._costs = costs
            self._device = SecondsTable(costs.device_seconds, tiles)
            self._host = SecondsTable(costs.host_seconds, tiles)
        rows = active.counts.tolist()
        missing = (tiles - residency[active.indices]).tolist()
        link = costs.link if view.staging else inf
        return ActiveCosts(
            rows,
            missing,
            [costs.fetch + link * count if count else 0.0 for count in missing],
            self._device(rows),
            self._host(rows),
            costs.round_trip,
            costs.launch,
        )
