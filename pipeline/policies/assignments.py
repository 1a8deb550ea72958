"""Assignment parts: they divide a layer's active experts between device and host, as cuts.

They plan from the view's costs, the rows that use each expert and the residency. The algorithms take the
seconds of every expert on either side and return a list of booleans, True where the device computes the
expert (`bandwidth` divides experts, and returns tiles). The two sides work at the same time, so a layer takes
as long as the slower one: the aim is min max(T_device, T_host), DALI's equation 3.

`exchange` and `launch` are the seconds that a layer's host share and its device share take beside their
experts, whatever their number: that side's sum begins with it, and is 0 without an expert. An expert that the
device cannot hold (DALI's equation 9) takes infinitely long there. Plain Python numbers throughout: a layer
of one token has a handful of experts, and a call of numpy costs as much as the whole loop. The replay's clock
(`pipeline/replay/machine.py`) counts the same parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np

from pipeline.arrays import IntArray
from pipeline.policies.options import Number, Option
from pipeline.policies.parts import Assignment, Parts
from pipeline.policies.view import Routing, View

Seconds = Sequence[float]


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
        """The arguments of `two_ended`."""
        return self.link, self.device, self.host, self.rows, self.exchange, self.launch


def active_costs(rows: list[int], missing: list[int], view: View, stays: bool = True) -> ActiveCosts:
    """The costs of experts with so many rows and missing tiles; one expert or more. `stays`: what is fetched
    is to stay, and so is moved whole; otherwise only the channels are that some row keeps.

    DALI's equation 9 bounds what the device holds at once. A missing tile passes through a staging slot,
    which is free again once the tile has been computed, so that any number of experts fits beside the
    resident ones, also with an empty cache. Without staging none does: its transfer would never end."""
    costs, tiles = view.costs, view.shape.tiles
    assert costs is not None
    link = costs.link if view.staging else inf
    device, host = costs.device_at, costs.host_at
    left = 0.0 if stays else 1 - view.kept
    per_tile = [link * (1 - left**count) for count in rows]
    return ActiveCosts(
        rows,
        missing,
        [costs.fetch + tile * n if n else 0.0 for n, tile in zip(missing, per_tile, strict=True)],
        [device[count] * tiles for count in rows],
        [host[count] * tiles for count in rows],
        costs.round_trip,
        costs.launch,
    )


def greedy(device: Seconds, host: Seconds, exchange: float, launch: float = 0.0) -> list[bool]:
    """DALI's Algorithm 1: each expert in turn, by descending difference of the two sides' seconds, goes to
    the side that has the smaller sum with it, to the device where both are equal."""
    on_device = [False] * len(device)
    device_total, host_total = launch, exchange
    apart = [abs(a - b) for a, b in zip(device, host, strict=True)]
    for index in sorted(range(len(apart)), key=apart.__getitem__, reverse=True):
        with_device, with_host = device_total + device[index], host_total + host[index]
        if with_device <= with_host:
            on_device[index] = True
            device_total = with_device
        else:
            host_total = with_host
    return on_device


def cheaper(fetched: Seconds, host: Seconds, exchange: float, launch: float = 0.0) -> list[bool]:
    """Fiddler's: each expert to the side that takes less time, `fetched` seconds with its transfer on the
    device (0: resident), to the device where both are equal. Where the host's experts gain less in all than
    the exchange takes, none goes there; otherwise none goes to the device where its experts gain less than
    the launch takes."""
    on_device = [there >= here for here, there in zip(fetched, host, strict=True)]
    gains = [here - there for here, there in zip(fetched, host, strict=True)]
    if sum(gain for gain in gains if gain > 0) <= exchange:
        return [True] * len(on_device)
    if -sum(gain for gain in gains if gain <= 0) < launch:
        return [False] * len(on_device)
    return on_device


def two_ended(
    link: Seconds,
    device: Seconds,
    host: Seconds,
    rows: Sequence[int],
    exchange: float,
    launch: float = 0.0,
) -> tuple[list[bool], float]:
    """HybriMoE's: one queue with the resident experts at its head and the missing ones behind, each heaviest
    first. The device takes from the head, the host from the tail, each time the side that would finish its
    next expert sooner (the device where both are equal). Missing experts are moved one after the other while
    the device computes others: one that takes `link` seconds is computed once it has landed. Also returns the
    seconds that the layer takes."""
    queue = sorted(range(len(rows)), key=lambda index: (link[index], -rows[index]))
    on_device = [False] * len(rows)
    landed, device_total, host_total = 0.0, launch, exchange
    head, tail = 0, len(queue) - 1
    while head <= tail:
        first, last = queue[head], queue[tail]
        done = max(device_total, landed + link[first]) + device[first]
        if done <= host_total + host[last]:
            on_device[first] = True
            landed += link[first]
            device_total = done
            head += 1
        else:
            host_total += host[last]
            tail -= 1
    return on_device, max(device_total if any(on_device) else 0.0, 0.0 if all(on_device) else host_total)


def bandwidth(
    link: Seconds, host: Seconds, rows: Sequence[int], missing: Sequence[int], exchange: float
) -> list[int]:
    """Bandwidth split: how many of each expert's missing tiles are fetched, the rest stay on the host. With
    seconds for all of an expert's missing tiles, all together take K on the link and H on the host: the share
    (exchange + H) / (K + H) of them, which without the exchange is rate_link / (rate_link + rate_host), makes
    both finish together. The tiles of the heaviest experts are fetched: they are the slowest on the host."""
    on_link, on_host = sum(link), sum(host)
    share = min(1.0, (exchange + on_host) / (on_link + on_host)) if on_link else 1.0
    left = round(share * sum(missing))
    answer = [0] * len(missing)
    for index in sorted(range(len(missing)), key=lambda index: -rows[index]):
        answer[index] = min(left, missing[index])
        left -= answer[index]
    return answer


class Device(Assignment):
    """All experts on the device; missing tiles are fetched."""

    name: ClassVar[str] = "device"
    help: ClassVar[str] = "every expert on the device, missing ones are fetched"
    uses_host: ClassVar[bool] = False

    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        return np.full(view.shape.experts, view.shape.tiles, np.int32)


class Host(Assignment):
    """All experts on the host, straight from the store."""

    name: ClassVar[str] = "host"
    help: ClassVar[str] = "every expert on the host, no tile is moved"
    uses_device: ClassVar[bool] = False
    fetches: ClassVar[bool] = False

    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        return np.zeros(view.shape.experts, np.int32)


class Resident(Assignment):
    """Each tile is computed where it is: no demand fetches, not even while the placement is still landing."""

    name: ClassVar[str] = "resident"
    help: ClassVar[str] = "resident tiles on the device, the others on the host"
    fetches: ClassVar[bool] = False

    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        # tiles beyond a target are about to be evicted
        resident: IntArray = np.minimum(view.residency[layer], view.target[layer])
        return resident


def given_back(cuts: Sequence[int], active: ActiveCosts, tiles: int, floor: float, whole: bool) -> list[int]:
    """Returns cuts of experts of so many tiles with fetched tiles given back to the host, as long as it ends
    by `floor`, before which other machines have not computed theirs: the experts that take longest to fetch
    first. `whole`: with their resident tiles."""
    answer = list(cuts)
    left = [host * (tiles - cut) / tiles for host, cut in zip(active.host, cuts, strict=True)]
    total = active.exchange + sum(left)
    for index in sorted(range(len(answer)), key=lambda index: -active.link[index]):
        kept = tiles - active.missing[index]
        then = active.host[index] if whole else active.host[index] * active.missing[index] / tiles
        if answer[index] > kept and total + then - left[index] <= floor:
            total += then - left[index]
            answer[index] = 0 if whole else kept
    return answer


class ByCosts(Assignment):
    """An assignment that compares the seconds of device, host and link. Where other machines have tiles of
    every expert, what it fetches is given back to the host as long as they end later than that."""

    needs_costs = True
    divides: ClassVar[bool] = False  # experts
    _stays = True  # what is fetched

    def join(self, parts: Parts) -> None:
        self._stays = parts.replacement.fills == "fetched"

    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        active = routing.active
        cut = np.zeros(view.shape.experts, np.int32)
        if len(active.experts):
            missing = (view.shape.tiles - view.residency[layer][active.indices]).tolist()
            costs, tiles = active_costs(active.counts.tolist(), missing, view, self._stays), view.shape.tiles
            cuts = self.tiles(costs, view)
            if view.costs is not None and view.costs.machines:
                floor = view.costs.floor(sum(costs.host))
                cuts = given_back(cuts, costs, tiles, floor, whole=not self.divides)
            cut[active.indices] = cuts
        return cut

    @abstractmethod
    def tiles(self, active: ActiveCosts, view: View) -> Sequence[int]:
        """The cut of each active expert."""


def _whole(on_device: Sequence[bool], view: View) -> list[int]:
    """Returns cuts that do not divide experts."""
    return [view.shape.tiles if here else 0 for here in on_device]


class Cheaper(ByCosts):
    """Fiddler (PAPERS.md, baselines): a missing expert is computed on the host where that takes less time
    than its transfer and its computing on the device: t_host(w) < transfer + t_device(w) for w rows. Each
    expert is decided by itself, without regard to the load of either side."""

    name: ClassVar[str] = "cheaper"
    help: ClassVar[str] = "a missing expert on the host where that takes less time than fetching it"

    def tiles(self, active: ActiveCosts, view: View) -> list[int]:
        costs = zip(active.missing, active.link, active.device, strict=True)
        fetched = [link + device if missing else 0.0 for missing, link, device in costs]
        return _whole(cheaper(fetched, active.host, active.exchange, active.launch), view)


class Threshold(Resident):
    """HybriMoE as DALI describes it (sections 1 and 3.1): by the workload alone, whatever the costs and the
    loads of the two sides are. What is resident needs no transfer, and is computed on the device."""

    name: ClassVar[str] = "threshold"
    help: ClassVar[str] = "a missing expert on the host unless it has more than so many rows"
    fetches: ClassVar[bool] = True
    options: ClassVar[tuple[Option, ...]] = (
        Number(name="rows", help="that an expert on the host has at most", default=4, low=0, high=10**6),
    )

    def __init__(self, *, rows: int) -> None:
        self._most = rows

    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        active, cut = routing.active, super().cut(layer, routing, view)
        cut[active.experts[active.counts > self._most]] = view.shape.tiles
        return cut


class Greedy(ByCosts):
    """DALI's greedy assignment (section 4.1, Algorithm 1). On the device an expert takes the longer of its
    transfer and its computing, which overlap: t_gpu = max(transfer, compute). The host's sum T_cpu begins
    with the exchange, the device's with its launch."""

    name: ClassVar[str] = "greedy"
    help: ClassVar[str] = "DALI's: one expert after the other to the side that finishes sooner"

    def tiles(self, active: ActiveCosts, view: View) -> list[int]:
        device = [max(pair) for pair in zip(active.link, active.device, strict=True)]
        return _whole(greedy(device, active.host, active.exchange, active.launch), view)


class TwoEnded(ByCosts):
    """HybriMoE's (PAPERS.md, baselines): the device from the head of a queue, resident and heavy experts
    first, the host from its tail."""

    name: ClassVar[str] = "two-ended"
    help: ClassVar[str] = "HybriMoE's: resident and heavy experts to the device, the lightest to the host"

    def tiles(self, active: ActiveCosts, view: View) -> list[int]:
        return _whole(two_ended(*active.for_queue)[0], view)


class Bandwidth(ByCosts):
    """The split of current engines (PAPERS.md, baselines): the share of missing tiles is fetched with which
    link and host finish together, by their rates; the device computes resident tiles."""

    name: ClassVar[str] = "bandwidth"
    help: ClassVar[str] = "of the missing tiles the share link / (link + host) is fetched, by their rates"
    divides: ClassVar[bool] = True

    def tiles(self, active: ActiveCosts, view: View) -> list[int]:
        whole, missing = view.shape.tiles, active.missing
        on_host = [seconds * tiles / whole for seconds, tiles in zip(active.host, missing, strict=True)]
        fetched = bandwidth(active.link, on_host, active.rows, missing, active.exchange)
        return [whole - tiles + more for tiles, more in zip(missing, fetched, strict=True)]


ASSIGNMENTS: tuple[type[Assignment], ...] = (
    Device, Host, Resident, Cheaper, Threshold, Greedy, TwoEnded, Bandwidth,
)  # fmt: skip
