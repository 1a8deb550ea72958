"""The replacement of the preset cache: experts enter in the background, where their copy pays.

A missing expert costs nothing to wait for: it is computed where it is missed, and its copy is an order of the
prefetch process that no layer waits for. What an admission costs is told by three numbers.

- **The slot is empty while the copy moves.** The victim leaves when the copy is ordered, so for `delay` steps
  neither is resident.
- **The copy takes memory from the workers.** It reads as many bytes of the host's memory as they do for one
  use, so it slows them by up to the time of one use, `host`.
- **The victim is not used** as long as it would have stayed. In a cache by recency an expert that is not used
  stays as many steps as the oldest has not been used: that is `stay`, for the newcomer as for the victim.

With `hot` and `cold` the shares of steps that use newcomer and victim, and `saved` the seconds that a use on
the device saves, an admission so pays where

    (hot * (stay - delay) - cold * stay) * saved >= host.

The delay is that of the link: the seconds of this copy and of those before it, over those of a step. A link
that brings an expert later than it would have stayed admits none, whatever it is used; neither does a host
that is as quick as the device. In between a slow link asks for hotter experts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import inf
from typing import ClassVar

import numpy as np

from pipeline.policies.costs import Costs
from pipeline.policies.options import Number
from pipeline.policies.parts import STAY, Expert, Moves, Room
from pipeline.policies.placements import known_counts
from pipeline.policies.replacements import Lru
from pipeline.policies.view import Active, ModelShape, View

LASTS = 64  # steps that a share of use is taken to last: a text goes on to something else
QUEUED = 4  # layers in whose time all copies under way land: others may be worth more by then
FRESH_PROMPT = 0.7  # weight of a prompt's step in the shares of use: it has many tokens


def pays(hot: float, cold: float, stay: float, delay: float, least: float) -> bool:
    """Whether an admission saves at least so many uses; as the module describes."""
    return hot * (stay - delay) - cold * stay >= least


class Prices:
    """What the rule takes from the costs of one row."""

    def __init__(self, costs: Costs, shape: ModelShape) -> None:
        self.costs = costs
        self._shape = shape
        self._host, self._device = (side[1] * shape.tiles for side in (costs.host_at, costs.device_at))
        self.copy = costs.fetch + costs.link * shape.tiles  # seconds of an expert
        saved = self._host - self._device
        self.least = self._host / saved if saved > 0 else inf  # uses that a copy has to save

    def layer(self, active: int, missing: int) -> float:
        """Seconds of a layer with so many experts, of which the host computes the missing ones."""
        here, there = self.costs.launch, self.costs.round_trip
        device = here + (active - missing) * self._device if active > missing else 0.0
        host = there + missing * self._host if missing else 0.0
        return self.costs.other_at[1] + max(device, host)

    def delay(self, copies: int, layer: float) -> float:
        """Steps until the last of so many copies lands, with layers of so many seconds."""
        step = self._shape.layers * layer
        return copies * self.copy / step if step > 0 else inf

    @property
    def soonest(self) -> float:
        """Steps that a copy takes at least: steps are longest where everything is missing."""
        return self.delay(1, self.layer(self._shape.top_k, self._shape.top_k))


class Admission(Lru):
    """Least recently used, layer by layer. What the device fetches anyway enters at once. What the host
    computes enters in the background, at its second miss within `window` steps, and only where the copy pays
    by the rule above. As many copies are under way as land while a few layers are computed, and at least
    one."""

    name: ClassVar[str] = "admission"
    help: ClassVar[str] = "the most recently used, and what the host computes where its copy pays"
    options = (
        Number(name="window", help="steps within which a second miss admits", default=8, low=2, high=1024),
    )
    fills: ClassVar[str] = "admitted"
    needs_costs = True

    def __init__(self, *, window: int) -> None:
        super().__init__(sizes="even")
        self._window = window
        self._fresh = 1 / window  # a step's weight in the shares of use

    def notes(self, view: View) -> tuple[str, ...]:
        assert view.costs is not None
        prices = Prices(view.costs, view.shape)
        if prices.least > LASTS:
            return ("no expert is admitted: by the costs the device is hardly faster than the host",)
        if not pays(1.0, 0.0, LASTS, prices.soonest, prices.least):
            late = f"{prices.soonest:.0f} tokens late"
            return (f"no expert is admitted: by the costs the link brings it {late}, when it has no use",)
        return ()

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        shape = view.shape
        counts = known_counts(view)
        self._sizes = room.sizes or ()
        self._orders = [OrderedDict() for _ in self._sizes]
        for key in sorted(placed, key=lambda key: counts[key]):  # the most used leave last
            self._orders[key[0]][key] = None
        share = counts * shape.top_k / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        # shares of use times `unit`, which grows, so that a step changes those of its own experts alone
        self._heat: list[list[float]] = share.tolist()
        self._unit = [1.0] * shape.layers
        self._steps = [0] * shape.layers
        self._used = [[0] * shape.experts for _ in range(shape.layers)]  # the latest step of each
        self._missed = [[-inf] * shape.experts for _ in range(shape.layers)]
        self._moving: deque[Expert] = deque()
        self._prices: Prices | None = None

    def after(self, layer: int, active: Active, view: View) -> Moves:
        missed = self._note(layer, active, view)
        if not missed or not self._sizes[layer] or view.phase != "decode":
            return STAY
        assert view.costs is not None
        prices = self._prices
        if prices is None or prices.costs is not view.costs:
            prices = self._prices = Prices(view.costs, view.shape)
        wanted = self._missed_again(layer, missed)
        return self._admit(layer, wanted, prices, prices.layer(len(active.experts), len(missed)), view)

    def _note(self, layer: int, active: Active, view: View) -> list[int]:
        """Count a step's uses. Returns the experts that the cache does not hold."""
        now = self._steps[layer] = self._steps[layer] + 1
        experts, order = active.experts.tolist(), self._orders[layer]
        heat, used = self._heat[layer], self._used[layer]
        decode = view.phase == "decode"
        fresh = self._fresh if decode else FRESH_PROMPT
        unit = self._unit[layer] / (1 - fresh)
        if decode:
            for expert in experts:
                heat[expert] += unit * fresh
                used[expert] = now
        else:
            each = unit * fresh * view.shape.top_k / len(active.rows)
            for expert, rows in zip(experts, active.counts.tolist(), strict=True):
                heat[expert] += each * rows
                used[expert] = now
        if unit > 2.0**500:
            self._heat[layer] = [share / unit for share in heat]
            unit = 1.0
        self._unit[layer] = unit
        return [expert for expert in experts if (layer, expert) not in order]

    def _missed_again(self, layer: int, missed: list[int]) -> list[int]:
        """The experts that were missed before within the window, the most used first."""
        now, before, heat = self._steps[layer], self._missed[layer], self._heat[layer]
        again = [expert for expert in missed if now - before[expert] <= self._window]
        for expert in missed:
            before[expert] = now
        return sorted(again, key=heat.__getitem__, reverse=True)

    def _admit(self, layer: int, wanted: list[int], prices: Prices, seconds: float, view: View) -> Moves:
        """Admit those of these experts whose copies pay, in a layer of so many seconds."""
        order, heat, unit, now = self._orders[layer], self._heat[layer], self._unit[layer], self._steps[layer]
        moving = self._moving
        out: list[Expert] = []
        into: list[Expert] = []
        for expert in wanted:
            while moving and view.residency[moving[0]] >= view.target[moving[0]]:  # landed, or left again
                moving.popleft()
            copies = len(moving) + 1
            if copies > 1 and copies * prices.copy > QUEUED * seconds:
                break
            delay = prices.delay(copies, seconds)
            stay, cold, oldest = float(LASTS), 0.0, None
            if len(order) == self._sizes[layer]:
                oldest = next(iter(order))
                age = now - self._used[layer][oldest[1]]
                stay, cold = min(stay, age), heat[oldest[1]] / unit
            if not pays(heat[expert] / unit, cold, stay, delay, prices.least):
                continue
            if oldest is not None:
                del order[oldest]
                out.append(oldest)
            order[layer, expert] = None
            into.append((layer, expert))
            moving.append((layer, expert))
        return Moves(out, into) if into else STAY
