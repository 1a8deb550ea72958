"""Divides a layer's active experts between the device and the host, each as a whole: the seconds of each on
either side, and the algorithms that decide.

Each algorithm takes the seconds of every expert on either side and returns a list of booleans, True where the
device computes the expert (`bandwidth` divides experts, and returns tiles). The two sides work at the same
time, so a layer takes as long as the slower one: the aim is min max(T_device, T_host), DALI's equation 3.

`exchange` and `launch` are the seconds that a layer's host share and its device share take beside their
experts, whatever their number: that side's sum begins with it, and is 0 without an expert. An expert that the
device cannot hold (DALI's equation 9) takes infinitely long there. Plain Python numbers throughout: a layer
of one token has a handful of experts, and a call of numpy costs as much as the whole loop. The replay's clock
(`pipeline/replay/machine.py`) counts the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from pipeline.arrays import IntArray
from pipeline.policies.costs import Costs, SecondsTable
from pipeline.policies.view import Active, View

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


def by_difference(device: Seconds, host: Seconds) -> list[int]:
    """DALI's order: by descending difference of the two sides' seconds, ties in the order given."""
    apart = [abs(a - b) for a, b in zip(device, host, strict=True)]
    return sorted(range(len(apart)), key=apart.__getitem__, reverse=True)


def greedy(device: Seconds, host: Seconds, exchange: float, launch: float = 0.0) -> list[bool]:
    """DALI's Algorithm 1: each expert in turn goes to the side that has the smaller sum with it, to the
    device where both are equal."""
    on_device = [False] * len(device)
    device_total, host_total = launch, exchange
    for index in by_difference(device, host):
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


class TwoEnded(NamedTuple):
    """HybriMoE's assignment, and the seconds that the layer takes with it."""

    on_device: list[bool]
    seconds: float


def two_ended(
    link: Seconds,
    device: Seconds,
    host: Seconds,
    rows: Sequence[int],
    exchange: float,
    launch: float = 0.0,
    queue: Sequence[int] | None = None,
) -> TwoEnded:
    """HybriMoE's: one queue with the resident experts at its head and the missing ones behind, each heaviest
    first. The device takes from the head, the host from the tail, each time the side that would finish its
    next expert sooner (the device where both are equal). Missing experts are moved one after the other while
    the device computes others: one that takes `link` seconds is computed once it has landed. `queue`: the
    experts in that order, where it is known."""
    if queue is None:
        queue = in_queue(link, rows)
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
    sides = (device_total if any(on_device) else 0.0, 0.0 if all(on_device) else host_total)
    return TwoEnded(on_device, max(sides))


def in_queue(link: Seconds, rows: Sequence[int]) -> list[int]:
    """The experts in the order of `two_ended`'s queue."""
    return sorted(range(len(rows)), key=lambda index: (link[index], -rows[index]))


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
