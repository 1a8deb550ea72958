"""The seconds of an engine's shares by the costs in force: what link and host still have to do, which is the
policy's `Backlog`, and beside what was measured, which corrects the costs (`cost_updates.py`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from pipeline.device import Device
from pipeline.engine.cost_updates import CostUpdates, Side, Work
from pipeline.engine.layer_times import Kind, LayerTimes
from pipeline.experts.device_share import DeviceMemory, EmptyDeviceMemory
from pipeline.experts.fetch_link import Order
from pipeline.experts.shares import Share, Split
from pipeline.policies.active_costs import SecondsTable
from pipeline.policies.costs import Costs
from pipeline.policies.view import Landing


class Timing:
    """Of one engine under one policy: a `Backlog`. Without costs every answer is 0 seconds."""

    def __init__(
        self,
        memory: DeviceMemory | EmptyDeviceMemory,
        device: Device,
        costs: Costs | None,
        follow: bool,
    ) -> None:
        """`costs`: per tile. `follow`: correct them by what runs."""
        self.updates = CostUpdates(costs) if follow and costs is not None else None
        self._layers = LayerTimes()
        self._memory = memory
        self._device = device
        self._tickets: deque[float] = deque()  # seconds of each host share that runs, the first one first
        self._host_free = 0.0  # when the host has computed them
        self._use(costs)
        self.begin_step()

    def _use(self, costs: Costs | None) -> None:
        self.costs = costs
        if costs is not None:
            self._host_table = SecondsTable(costs.host_seconds, 1)
            self._device_table = SecondsTable(costs.device_seconds, 1)

    # --- the policy's view -------------------------------------------------------------------------------

    @property
    def host_seconds(self) -> float:
        """As in Backlog."""
        return max(0.0, self._host_free - time.perf_counter())

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

    def begin_step(self) -> None:
        """Shares of a step that failed will not be computed."""
        self._tickets.clear()
        self._host_free = 0.0
        self._work: dict[Side, Work] = {"host": Work(), "device": Work(), "link": Work()}
        self._marks: list[tuple[object, object]] = []  # of the device's resident tiles
        self._copied = self._memory.copied()
        self._began: float | None = None  # the layer that is timed
        self._layers.begin_step()

    def layer_begins(self, split: Split) -> None:
        """A decode layer's shares begin."""
        if self.updates is None:
            return
        missing = [hi - lo for _, lo, hi in split.device.items.tolist() if lo < hi]
        self._fetched = len(missing), sum(missing)  # experts, tiles
        self._began = time.perf_counter()
        self._planned = {"host": 0.0, "device": 0.0}

    def layer_ends(self) -> None:
        """The layer that began last has been computed."""
        if self._began is None or self.costs is None:
            return
        measured = time.perf_counter() - self._began
        self._began = None
        host, device = self._planned["host"], self._planned["device"]
        fetched, tiles = self._fetched
        planned = max(host, device)
        kind: Kind = "host" if host else "device"
        if host and (device or fetched):
            planned += self.costs.both
            kind = "both"
        if fetched:
            link = self.costs.fetch * fetched + self.costs.link * tiles + self.costs.device[0]
            self._layers.note("link", max(planned, link), measured, fetched)
        elif kind != "device" or self._device.on_host:  # another device may still compute
            self._layers.note(kind, planned, measured)

    def host_begins(self, share: Share) -> None:
        """The host was given a share."""
        if self.costs is None or not len(share.items):
            return
        tiles = [hi - lo for _, lo, hi in share.items.tolist()]
        seconds = self._add("host", self._host_table, share.offsets.tolist(), tiles)
        begins = max(self._host_free, time.perf_counter() + self.costs.round_trip)
        self._host_free = begins + seconds
        if self._began is not None:
            self._planned["host"] += self.costs.round_trip + seconds
        self._tickets.append(seconds)

    def host_ends(self, busy: float) -> None:
        """The first share that runs has been computed, in `busy` seconds of the slowest worker."""
        if self._tickets:
            self._tickets.popleft()
            self._host_free = time.perf_counter() + sum(self._tickets)
            self._work["host"].measured += busy

    def device_began(self, share: Share) -> None:
        """The device computes its share's resident tiles, between the marks of its memory."""
        resident = share.items[:, 1].tolist()
        if self.costs is not None and any(resident):
            seconds = self._add("device", self._device_table, share.offsets.tolist(), resident)
            # `launch` as measured at first: its correction is not of the tiles
            launch = self.costs.launch if self.updates is None else self.updates.measured.launch
            self._work["device"].planned += launch
            if self._began is not None:
                self._planned["device"] += self.costs.launch + seconds
            self._marks.append(self._memory.resident_marks)

    def end_step(self) -> bool:
        """True where the costs in force changed."""
        if self.updates is None or self.costs is None:
            return False
        tiles, seconds = self._memory.copied()
        tiles, seconds = tiles - self._copied[0], seconds - self._copied[1]
        work = self._work
        for marks in self._marks:
            work["device"].measured += self._device.seconds_between(*marks)
        work["link"] = Work(self.costs.link * tiles, seconds, tiles, tiles)
        host, device, link = (work[side].measured for side in ("host", "device", "link"))
        beside = device if self._device.on_host else 0.0
        contended: dict[Side, bool] = {
            "host": link + beside >= host / 2,
            "device": host >= device / 2,
            "link": host + beside >= link / 2,
        }
        tiles_changed = self.updates.end_step(work, contended)
        if tiles_changed:
            self._layers.restart()
        elif not self._layers.end_step():
            return False
        self._use(self._layers.corrected(self.updates.costs))
        return True

    def _add(self, side: Side, table: SecondsTable, offsets: list[int], tiles: list[int]) -> float:
        """Count a share's tiles of each item. Returns their seconds."""
        rows = [end - start for start, end in pairwise(offsets)]
        seconds = sum(seconds * count for seconds, count in zip(table(rows), tiles, strict=True))
        self._work[side].add(
            seconds, sum(tiles), sum(row * count for row, count in zip(rows, tiles, strict=True))
        )
        return seconds
