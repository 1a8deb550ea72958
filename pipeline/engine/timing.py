"""The seconds of an engine's shares by the costs in force: what link and host still have to do, which is the
policy's `Backlog`, and beside what was measured, which corrects the costs (`cost_updates.py`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from pipeline.device import Device
from pipeline.engine.cost_updates import SIDES, Side, Work
from pipeline.engine.layer_times import Kind
from pipeline.engine.learned_costs import Learned, tables
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.mover import Order
from pipeline.experts.shares import Share, Split
from pipeline.policies.active_costs import SecondsTable
from pipeline.policies.backlog import Landing
from pipeline.policies.costs import Costs


class Timing:
    """Of one engine under one policy: a `Backlog`. Without costs every answer is 0 seconds."""

    def __init__(
        self,
        memory: DeviceMemory,
        device: Device,
        costs: Costs | None,
        learned: Learned | None = None,
    ) -> None:
        """`costs`: per tile, of which `learned` corrects those that were measured."""
        self.learned = None if costs is None else learned
        self._memory = memory
        self._device = device
        self._tickets: deque[tuple[Share, float]] = deque()  # host shares that run, and when each was given
        self._given = None if costs is None else tables(costs)
        self.begin_step(1)

    @property
    def costs(self) -> Costs | None:
        """In force in this step."""
        return None if self._in_force is None else self._in_force.costs

    # --- the policy's view -------------------------------------------------------------------------------

    @property
    def host_seconds(self) -> float:
        """As in Backlog."""
        if not self._tickets or self._in_force is None:
            return 0.0
        costs, table, _ = self._in_force
        free = self._host_ended
        for share, given in self._tickets:
            seconds, _, _ = _work(table, share, _tiles(share))
            free = max(free, given + costs.round_trip) + seconds
        return max(0.0, free - time.perf_counter())

    @property
    def link_seconds(self) -> float:
        """As in Backlog."""
        return sum(seconds for _, seconds in self._under_way())

    def landing(self, layer: int) -> Sequence[Landing]:
        """As in Backlog."""
        found, at = [], 0.0
        residency = self._memory.residency
        for order, seconds in self._under_way():
            at += seconds
            if order.layer == layer and order.lo <= residency[layer, order.expert]:
                tiles = order.lo + order.reach - int(residency[layer, order.expert])
                if tiles > 0:
                    found.append(Landing(order.expert, tiles, at))
        return found

    def _under_way(self) -> list[tuple[Order, float]]:
        """The link's orders, and the seconds that each will take."""
        costs, (orders, moving) = self.costs, self._memory.under_way()
        if costs is None:
            return [(order, 0.0) for order in orders]
        found = []
        for order in orders:
            seconds = (order.reach - order.landed) * costs.link + (0.0 if order.landed else costs.fetch)
            found.append((order, seconds - min(moving, costs.link)))
            moving = 0.0  # only the first one's tile moves
        return found

    # --- what runs ---------------------------------------------------------------------------------------

    def begin_step(self, rows: int) -> None:
        """A step of so many rows. Shares of one that failed will not be computed."""
        self._rows = rows
        self._in_force = self._given if self.learned is None else self.learned.in_force(rows)
        self._started = time.perf_counter()
        self._measures = self.learned is not None and self.learned.begin_step(rows)
        self._tickets.clear()
        self._host_ended = 0.0  # when the host had computed the latest share
        self._work: dict[Side, Work] = {side: Work() for side in SIDES}
        self._marks: list[tuple[object, object]] = []  # of the device's resident tiles
        self._copied = self._memory.copied()
        self._began: float | None = None  # the layer that is timed
        self._rested = False  # the layer before had no host share
        if self.learned is not None:
            self.learned.layers(rows).begin_step()

    def layer_begins(self, split: Split) -> None:
        """A layer's shares begin."""
        if not self._measures:
            return
        items = split.device.items
        missing = [hi - lo for _, lo, hi in items.tolist() if lo < hi] if len(items) else []
        self._fetched = len(missing), sum(missing)  # experts, tiles
        self._began = time.perf_counter()
        self._planned = {"host": 0.0, "device": 0.0}

    def layer_ends(self) -> None:
        """The layer that began last has been computed."""
        if self._began is None or self.learned is None or self.costs is None:
            return
        measured = time.perf_counter() - self._began
        self._began = None
        host, device = self._planned["host"], self._planned["device"]
        layers, (fetched, tiles) = self.learned.layers(self._rows), self._fetched
        planned = max(host, device)
        kind: Kind = "wake" if host and self._rested else "host" if host else "device"
        self._rested = not host
        if host and (device or fetched):
            planned += self.costs.both
            kind = "both"
        if fetched:
            link = self.costs.fetch * fetched + self.costs.link * tiles + self.costs.device[0]
            layers.note("link", max(planned, link), measured, fetched)
        elif kind != "device" or self._device.on_host:  # another device may still compute
            layers.note(kind, planned, measured)

    def host_begins(self, share: Share) -> None:
        """The host was given a share."""
        if self._in_force is None or not len(share.items):
            return
        self._tickets.append((share, time.perf_counter()))
        if self._measures:
            costs, table, _ = self._in_force
            seconds = self._add("host", table, share, _tiles(share))
            if self._began is not None:
                self._planned["host"] += costs.round_trip + costs.wake * self._rested + seconds

    def host_ends(self, busy: float) -> None:
        """The first share that runs has been computed, in `busy` seconds of the slowest worker."""
        if self._tickets:
            self._tickets.popleft()
            self._host_ended = time.perf_counter()
            self._work["host"].measured += busy

    def device_began(self, share: Share) -> None:
        """The device computes its share's resident tiles between the marks of its memory."""
        if not self._measures:
            return
        resident = share.items[:, 1].tolist()
        if self._in_force is not None and any(resident):
            costs, _, table = self._in_force
            seconds = self._add("device", table, share, resident)
            # `launch` as measured at first: its correction is not of the tiles
            launch = (costs if self.learned is None else self.learned.updates.measured).launch
            self._work["device"].planned += launch
            if self._began is not None:
                self._planned["device"] += costs.launch + seconds
            self._marks.append(self._memory.resident_marks)

    def end_step(self) -> float:
        """The costs in force may change with the next step. Returns this one's seconds; 0 where costs do not
        follow what runs."""
        learned, costs = self.learned, self.costs
        if learned is None or costs is None:
            return 0.0
        seconds = time.perf_counter() - self._started
        if self._measures:
            self._learn(learned, costs)
        return seconds

    def _learn(self, learned: Learned, costs: Costs) -> None:
        tiles, seconds = self._memory.copied()
        tiles, seconds = tiles - self._copied[0], seconds - self._copied[1]
        work = self._work
        for marks in self._marks:
            work["device"].measured += self._device.seconds_between(*marks)
        work["link"] = Work(costs.link * tiles, seconds, tiles, tiles)
        host, device, link = (work[side].measured for side in ("host", "device", "link"))
        beside = device if self._device.on_host else 0.0
        contended: dict[Side, bool] = {
            "host": link + beside >= host / 2,
            "device": host >= device / 2,
            "link": host + beside >= link / 2,
            "zero_copy": True,
        }
        layers_changed = learned.layers(self._rows).end_step()
        if learned.updates.end_step(work, contended):
            learned.tiles_changed(self._rows)
        elif layers_changed:
            learned.layers_changed(self._rows)

    def _add(self, side: Side, table: SecondsTable, share: Share, tiles: list[int]) -> float:
        """Count a share's tiles of each item. Returns their seconds."""
        seconds, total, used = _work(table, share, tiles)
        self._work[side].add(seconds, total, used)
        return seconds


def _tiles(share: Share) -> list[int]:
    return [hi - lo for _, lo, hi in share.items.tolist()]


def _work(table: SecondsTable, share: Share, tiles: list[int]) -> tuple[float, int, int]:
    """Of a share with so many tiles of each item: seconds, tiles, and rows of each tile summed."""
    total = sum(tiles)
    if len(share.rows) == len(tiles):  # a row each
        (each,) = table((1,))
        return each * total, total, total
    rows = [end - start for start, end in pairwise(share.offsets.tolist())]
    seconds = sum(seconds * count for seconds, count in zip(table(rows), tiles, strict=True))
    return seconds, total, sum(row * count for row, count in zip(rows, tiles, strict=True))
