"""Divides a layer's active experts by the balanced cut (`filling.py`), from arrays of the active experts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from pipeline.arrays import IntArray
from pipeline.policies.costs import Costs
from pipeline.policies.filling import Fixed, Group, Sides, balance
from pipeline.policies.view import Active, View

_TABLES = 8  # of costs that are kept


class Balanced(NamedTuple):
    """A layer's tiles divided by the balanced cut, and what follows by the costs."""

    groups: list[Group]
    fixed: Fixed
    sides: Sides
    members: Sequence[list[int]]  # the places of each group's experts; none: all are of one
    seconds: float  # until the layer has ended
    alone: float  # until it would have ended without the device
    moved: int  # missing tiles that the device computes
    spare: float  # seconds in which the link has nothing to move before the layer ends
    leaves: bool  # the host computes even resident tiles, so that others would not be used
    pays: bool  # the device alone, with every tile there, saves more than ordering an expert takes

    @classmethod
    def of(
        cls, groups: list[Group], fixed: Fixed, floor: float = 0.0, members: Sequence[list[int]] = ()
    ) -> Balanced:
        """Divides the groups' tiles. `floor`: seconds until other machines have computed their tiles."""
        sides = balance(groups, fixed, floor)
        alone, there, moved, leaves = fixed.host, fixed.launch, 0, False
        for group in groups:
            tiles = group.resident + group.missing
            alone += group.host * tiles
            there += group.device * tiles
            if group.taken > group.resident:
                moved += group.taken - group.resident
            elif group.taken < group.resident:
                leaves = True
        seconds, alone = max(sides.seconds, floor), max(alone, floor)
        spare = max(0.0, seconds - moved * fixed.tile) if moved else seconds
        pays = alone - max(there, floor) > fixed.fetch
        return cls(groups, fixed, sides, members, seconds, alone, moved, spare, leaves, pays)


class _Table:
    """Layers of one row that were divided by some costs."""

    def __init__(self, costs: Costs, staging: int, kept: float) -> None:
        """`kept`: of a tile's channels, by a row."""
        self.costs, self.tile = costs, costs.link if staging else inf
        common = costs.round_trip, costs.launch, 0.0
        self.fixed = Fixed(*common, self.tile, costs.fetch)
        self.of_one = Fixed(*common, kept * self.tile, costs.fetch)  # where each expert has one row
        self.known: dict[tuple[int, int, int], Balanced] = {}


class Divider:
    """Divides layers by the costs in force."""

    _used: _Table

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}  # by identity: those of few rows and of many take turns

    def use(self, view: View) -> None:
        """Plan with the view's costs from now on."""
        costs = view.costs
        assert costs is not None
        if self._tables and self._used.costs is costs:
            return
        table = self._tables.get(id(costs))
        if table is None or table.costs is not costs:
            if len(self._tables) == _TABLES:
                self._tables.clear()
            table = self._tables[id(costs)] = _Table(costs, view.staging, view.kept)
        self._used = table

    @property
    def tile(self) -> float:
        """Seconds of a whole tile on the link; infinite where none can be moved."""
        return self._used.tile

    @property
    def of_one(self) -> Fixed:
        """What layers are divided by of which each expert has one row."""
        return self._used.of_one

    def worthless(self, experts: int, tiles: int) -> bool:
        """True where the host computes all of so many experts of one row each, wherever their tiles are."""
        return not self._single(experts, experts * tiles, 0, 0).groups[0].taken

    def balanced(self, active: Active, resident: IntArray, tiles: int) -> Balanced:
        """`resident` [m]: tiles of each active expert; at least one is active."""
        rows = active.counts
        if len(active.rows) == len(rows):  # one row, or rows that share no expert
            kept: list[int] = resident.tolist()
            total = sum(kept)
            return self._single(len(rows), total, tiles * len(rows) - total, len(rows) - kept.count(tiles))
        kept = resident.tolist()
        places: dict[int, list[int]] = {}  # few, so that arrays would take longer
        for place, count in enumerate(rows.tolist()):
            places.setdefault(count, []).append(place)
        groups, members = [], []
        for count in sorted(places):
            here = [kept[place] for place in places[count]]
            held = sum(here)
            groups.append(self._group(count, held, tiles * len(here) - held, len(here) - here.count(tiles)))
            members.append(places[count])
        return self._divided(groups, self._used.fixed, members)

    def _single(self, experts: int, resident: int, missing: int, lacking: int) -> Balanced:
        """Divide experts with a row each. Few of these differ, so each is computed once."""
        key = experts, missing, lacking
        balanced = self._used.known.get(key)
        if balanced is None:
            group = self._group(1, resident, missing, lacking)
            balanced = self._used.known[key] = self._divided([group], self._used.of_one)
        return balanced

    def _divided(self, groups: list[Group], fixed: Fixed, members: Sequence[list[int]] = ()) -> Balanced:
        floor = 0.0
        if self._used.costs.machines:
            floor = self._used.costs.floor(sum([group.host * group.tiles for group in groups]))
        return Balanced.of(groups, fixed, floor, members)

    def _group(self, rows: int, resident: int, missing: int, lacking: int) -> Group:
        costs = self._used.costs
        return Group(costs.host_at[rows], costs.device_at[rows], resident, missing, lacking)


def cuts(balanced: Balanced, resident: IntArray, tiles: int, values: Sequence[float]) -> list[int]:
    """The groups' totals as cuts [m] of their experts. Of experts with equally many rows those of greater
    value are fetched first, and those of smaller value go to the host."""
    groups = balanced.groups
    if all([group.taken == group.tiles for group in groups]):
        return [tiles] * len(resident)
    cut: list[int] = resident.tolist()
    every = balanced.members or [list(range(len(cut)))]
    for group, members in zip(groups, every, strict=True):
        move(cut, group.taken - group.resident, members, tiles, values)
    return cut


def move(cut: list[int], more: int, members: list[int], tiles: int, values: Sequence[float]) -> None:
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
