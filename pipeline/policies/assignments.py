"""Assignment parts: they divide a layer's active experts between device and host, as cuts.

They plan from the view's costs, the rows that use each expert and the residency; the algorithms over plain
seconds are in `balance.py`. A resident tile is not moved: `link` is paid for missing ones only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pipeline.arrays import IntArray
from pipeline.policies import balance
from pipeline.policies.balance import ActiveCosts, LayerSeconds
from pipeline.policies.parts import Assignment
from pipeline.policies.view import Routing, View


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


class ByCosts(Assignment):
    """An assignment that compares the seconds of device, host and link."""

    needs_costs = True

    def __init__(self) -> None:
        self._seconds = LayerSeconds()

    def cut(self, layer: int, routing: Routing, view: View) -> IntArray:
        active = routing.active
        cut = np.zeros(view.shape.experts, np.int32)
        if len(active.experts):
            cut[active.indices] = self.tiles(self._seconds.of(active, view.residency[layer], view), view)
        return cut

    @abstractmethod
    def tiles(self, active: ActiveCosts, view: View) -> Sequence[int]:
        """The cut of each active expert."""


class WholeByCosts(ByCosts):
    """An assignment by costs that does not divide experts."""

    def tiles(self, active: ActiveCosts, view: View) -> list[int]:
        return [view.shape.tiles if here else 0 for here in self.on_device(active)]

    @abstractmethod
    def on_device(self, active: ActiveCosts) -> list[bool]:
        """Whether the device computes each active expert."""


class Cheaper(WholeByCosts):
    """Fiddler (PAPERS.md, baselines): a missing expert is computed on the host where that takes less time
    than its transfer and its computing on the device: t_host(w) < transfer + t_device(w) for w rows. Each
    expert is decided by itself, without regard to the load of either side."""

    name: ClassVar[str] = "cheaper"
    help: ClassVar[str] = "a missing expert on the host where that takes less time than fetching it"

    def on_device(self, active: ActiveCosts) -> list[bool]:
        costs = zip(active.missing, active.link, active.device, strict=True)
        fetched = [link + device if missing else 0.0 for missing, link, device in costs]
        return balance.cheaper(fetched, active.host, active.exchange, active.launch)


class Greedy(WholeByCosts):
    """DALI's greedy assignment (section 4.1, Algorithm 1). On the device an expert takes the longer of its
    transfer and its computing, which overlap: t_gpu = max(transfer, compute). The host's sum T_cpu begins
    with the exchange, the device's with its launch."""

    name: ClassVar[str] = "greedy"
    help: ClassVar[str] = "DALI's: one expert after the other to the side that finishes sooner"

    def on_device(self, active: ActiveCosts) -> list[bool]:
        device = [max(pair) for pair in zip(active.link, active.device, strict=True)]
        return balance.greedy(device, active.host, active.exchange, active.launch)


class TwoEnded(WholeByCosts):
    """HybriMoE's (PAPERS.md, baselines): the device from the head of a queue, resident and heavy experts
    first, the host from its tail."""

    name: ClassVar[str] = "two-ended"
    help: ClassVar[str] = "HybriMoE's: resident and heavy experts to the device, the lightest to the host"

    def on_device(self, active: ActiveCosts) -> list[bool]:
        return balance.two_ended(*active.for_queue).on_device


class Bandwidth(ByCosts):
    """The split of current engines (PAPERS.md, baselines): the share of missing tiles is fetched with which
    link and host finish together, by their rates; the device computes resident tiles."""

    name: ClassVar[str] = "bandwidth"
    help: ClassVar[str] = "of the missing tiles the share link / (link + host) is fetched, by their rates"

    def tiles(self, active: ActiveCosts, view: View) -> list[int]:
        whole, missing = view.shape.tiles, active.missing
        on_host = [seconds * tiles / whole for seconds, tiles in zip(active.host, missing, strict=True)]
        fetched = balance.bandwidth(active.link, on_host, active.rows, missing, active.exchange)
        return [whole - tiles + more for tiles, more in zip(missing, fetched, strict=True)]


ASSIGNMENTS: tuple[type[Assignment], ...] = (
    Device, Host, Resident, Cheaper, Greedy, TwoEnded, Bandwidth,
)  # fmt: skip
