"""Divides a layer's active experts by the balanced cut (`filling.py`), from arrays of the active experts."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.policies.costs import Costs
from pipeline.policies.filling import Fixed, Group, Sides, balance
from pipeline.policies.view import Active, View

_TABLE = 512  # row counts with seconds in a table; wider batches are few and slow


class Division(NamedTuple):
    """A layer's cuts, and what follows from them by the costs."""

    cut: IntArray  # [m], of the active experts
    values: list[float]  # [m], what a tile of each is worth
    sides: Sides
    moved: int  # missing tiles that the device computes
    spare: float  # seconds in which the link has nothing to move before the layer ends
    groups: list[Group]
    fixed: Fixed

    @property
    def gain(self) -> float:
        """Seconds that the layer would save if one more tile were resident, of the group where that saves
        most; 0 where all are."""
        best = 0.0
        if any(group.taken < group.resident for group in self.groups):
            return best  # the host computes even resident tiles
        for index, group in enumerate(self.groups):
            if group.missing:
                others = [_copied(other) for other in self.groups]
                others[index].resident += 1
                others[index].missing -= 1
                others[index].lacking = min(group.lacking, others[index].missing)
                both = self.fixed.both
                best = max(best, self.sides.layer(both) - balance(others, self.fixed).layer(both))
        return best


class Divider:
    """Looks up the costs in force, and divides layers by them."""

    def __init__(self) -> None:
        self._costs: Costs | None = None

    def use(self, view: View) -> None:
        """Plan with the view's costs from now on."""
        costs = view.costs
        assert costs is not None
        if costs is self._costs:
            return
        self._costs, rows = costs, np.arange(_TABLE)
        self._host: list[float] = costs.host_seconds(rows, 1).tolist()
        self._device: list[float] = costs.device_seconds(rows, 1).tolist()
        self._other: list[float] = costs.other_seconds(rows).tolist()
        self.tile = costs.link if view.staging else inf
        self._fixed = Fixed(costs.round_trip, costs.launch, 0.0, self.tile, costs.fetch, costs.both)

    def host(self, rows: int) -> float:
        """Seconds of a tile on the host."""
        assert self._costs is not None
        return self._host[rows] if rows < _TABLE else float(self._costs.host_seconds(rows, 1))

    def saves(self, tiles: int) -> bool:
        """Whether an expert of so many tiles that is there can save a row more than ordering it takes."""
        return tiles * (self.host(1) - self.device(1)) > self._fixed.fetch

    def device(self, rows: int) -> float:
        """Seconds of a tile on the device."""
        assert self._costs is not None
        return self._device[rows] if rows < _TABLE else float(self._costs.device_seconds(rows, 1))

    def other(self, rows: int) -> float:
        """Seconds of a layer's other work on the device."""
        assert self._costs is not None
        return self._other[rows] if rows < _TABLE else float(self._costs.other_seconds(rows))

    def divide(
        self, active: Active, resident: IntArray, tiles: int, worth: NDArray[np.float32], busy: float = 0.0
    ) -> Division:
        """`resident` [m]: tiles of each active expert; at least one is active. Of experts with equally many
        rows those of greater `worth` [E] are fetched first. `busy`: seconds until the host is free."""
        fixed = self._fixed if busy <= self._fixed.host else self._fixed._replace(host=busy)
        rows = active.counts
        if len(active.rows) == len(rows):  # one row, or rows that share no expert
            missing = (tiles - resident).tolist()
            total = sum(missing)
            groups = [
                Group(
                    self.host(1),
                    self.device(1),
                    tiles * len(rows) - total,
                    total,
                    len(rows) - missing.count(0),
                )
            ]
            found = [1]
        else:
            counted = np.bincount(rows)
            found = counted.nonzero()[0].tolist()
            lacks = resident < tiles
            kept = np.bincount(rows, resident).tolist()
            lacking = np.bincount(rows, lacks).tolist()
            groups = [
                Group(
                    self.host(count),
                    self.device(count),
                    int(kept[count]),
                    tiles * int(counted[count]) - int(kept[count]),
                    int(lacking[count]),
                )
                for count in found
            ]
        ends = balance(groups, fixed)
        values: list[float] = worth.take(active.experts).tolist()
        cut = self._cuts(active, resident, tiles, values, groups, found)
        moved = sum(max(0, group.taken - group.resident) for group in groups)
        whole = ends.layer(fixed.both)
        spare = whole - moved * fixed.tile if moved else whole
        return Division(cut, values, ends, moved, max(0.0, spare), groups, fixed)

    def _cuts(
        self,
        active: Active,
        resident: IntArray,
        tiles: int,
        values: list[float],
        groups: list[Group],
        found: list[int],
    ) -> IntArray:
        """The groups' totals as cuts of their experts."""
        if all([group.taken == group.tiles for group in groups]):
            return np.full(len(resident), tiles, np.int32)
        cut: list[int] = resident.tolist()
        for group, count in zip(groups, found, strict=True):
            if len(groups) == 1:
                members = list(range(len(cut)))
            else:
                members = (active.counts == count).nonzero()[0].tolist()
            _move(cut, group.taken - group.resident, members, tiles, values)
        return np.array(cut, np.int32)


def _move(cut: list[int], more: int, members: list[int], tiles: int, values: list[float]) -> None:
    """Change the cuts of these experts by `more` tiles in all: beyond the residency the most valuable come
    first; short of it the least valuable go to the host."""
    if not more:
        return
    members.sort(key=values.__getitem__, reverse=more > 0)
    for index in members:
        now = cut[index]
        then = min(tiles, now + more) if more > 0 else max(0, now + more)
        cut[index] = then
        more -= then - now
        if not more:
            return


def _copied(group: Group) -> Group:
    return Group(group.host, group.device, group.resident, group.missing, group.lacking)
