"""The preset tandem: experts that are resident in part, and computed in part by either side."""

from __future__ import annotations

from math import inf
from operator import itemgetter
from typing import ClassVar

import numpy as np

from pipeline.arrays import IntArray
from pipeline.errors import PolicyError
from pipeline.policies.division import Divider, Division
from pipeline.policies.options import PAUSE, Choice, Option
from pipeline.policies.predictions import by_probability
from pipeline.policies.view import Gated, Plan, Policy, Routing, Signals, Target, View
from pipeline.policies.worth import Worth

PAYS_WITHIN = 64  # steps in which a move in the background saves as much time as it takes of the link


class Tandem(Policy):
    """Exact. In every layer the balanced cut divides the active experts (`filling.py`): resident tiles on the
    device, and of the missing ones so many are fetched that both sides finish together.

    A fetched tile stays in the place of one that is worth less (`worth.py`), so the cache follows the text at
    no cost. While the link has nothing to move, tiles of the experts that the next layer's router names are
    fetched: as many as land before that layer, and none where that is none. Where a layer fetches nothing
    either, an expert that is worth more than a resident one is moved in the background, if that pays soon."""

    name = "tandem"
    help: ClassVar[str] = "Experts divided so that both sides finish together"
    options: ClassVar[tuple[Option, ...]] = (
        Choice(name="prefetch", help="0: nothing is fetched ahead", default="1", choices=("1", "0")),
        PAUSE,
    )
    needs_costs = True
    likes_calibration = True
    settles = 16

    def __init__(self, *, prefetch: str, pause: str) -> None:
        self._prefetches = prefetch == "1"
        self.pauses = pause == "1"
        self._divider = Divider()
        self._division: Division | None = None  # of the present layer
        self._moving: tuple[int, int] | None = None  # in the background

    def placement(self, view: View) -> IntArray:
        if view.costs is None:
            raise PolicyError(f"policy {self.name} plans by costs, and none were measured or given (--costs)")
        known = view.calibration
        counts = view.popularity if known is None else known.decode_counts
        self._worth = Worth(view.shape, view.capacity, counts)
        # by layer: missing tiles that could have landed before the next layer, when it was planned last
        self._ahead = [1] * view.shape.layers
        self._moving = None
        return self._worth.target.copy()

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        following = layer + 1
        wanted = self._prefetches and view.prefetching and view.capacity and following < view.shape.layers
        return (following,) if wanted and self._ahead[layer] else ()

    def gate(self, layer: int, signals: Signals, view: View) -> Gated:
        assert signals.logits is not None
        if view.capacity:
            self._worth.observe(layer, signals.logits, view.phase)
        return super().gate(layer, signals, view)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        active, tiles = routing.active, view.shape.tiles
        cut = np.zeros(view.shape.experts, np.int32)
        self._division = None
        if not len(active.experts):
            return Plan(cut)
        worth, divider = self._worth, self._divider
        divider.use(view)
        kept = worth.target[layer].take(active.experts)
        resident = np.minimum(view.residency[layer].take(active.experts), kept)  # the others are evicted
        value = worth.value[layer]
        divided = self._division = divider.divide(active, resident, tiles, value, view.backlog.host_seconds)
        cut.put(active.experts, divided.cut)
        free = divided.spare + divider.other(len(routing.experts))
        self._ahead[layer] = int(free / divider.tile) if divider.tile > 0 else tiles * len(active.experts)
        for group in divided.groups:
            if group.taken < group.resident:
                self._ahead[layer] = 0  # the host computes even resident tiles: others would not be used
        if not divider.saves(tiles):
            self._ahead[layer] = 0
        if not (divided.moved and view.capacity):
            return Plan(cut)
        targets: list[Target] = []
        worth.protect(layer, active.experts)
        cuts = zip(divided.values, active.experts.tolist(), (divided.cut - kept).tolist(), strict=True)
        fetched = [found for found in cuts if found[2] > 0]
        fetched.sort(key=itemgetter(0), reverse=True)
        for worth_of, expert, more in fetched:
            grown = worth.grow(layer, expert, more, worth_of, layer)
            if not grown:
                break
            targets += grown
        worth.release(layer)
        return Plan(cut, tuple(targets))

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        self.no_room = 0
        following, left = layer + 1, self._ahead[layer]
        if not left or following not in signals.probes:
            return ()
        assert view.router is not None
        worth, tiles = self._worth, view.shape.tiles
        named = by_probability(view.router(signals.probes[following]))
        kept = worth.target[following].take(named).tolist()
        wanted = [(expert, tiles - held) for expert, held in zip(named, kept, strict=True) if held < tiles]
        if not wanted:
            return ()
        targets: list[Target] = []
        for expert, missing in wanted:
            more = min(missing, left)
            grown = worth.grow(following, expert, more, inf, layer, within=False)  # it is being computed
            if not grown:
                self.no_room += 1
            targets += grown
            left -= more
            if not left:
                break
        return tuple(targets)

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        divided = self._division
        if divided is None or divided.moved or not view.capacity or view.phase != "decode":
            return ()
        if self._moving is not None:
            if view.residency[self._moving] < self._worth.target[self._moving]:
                return ()
            self._moving = None
        if not self._divider.saves(view.shape.tiles) or not divided.gain:
            return ()
        worth, tiles = self._worth, view.shape.tiles
        outside = worth.value[layer] * (worth.target[layer] == 0)
        expert = int(outside.argmax())
        # one row uses k experts; each tile that is resident saves the host's time of it
        seconds = self._divider.host(1) * view.shape.top_k * PAYS_WITHIN
        least = float(outside[expert]) - (self._divider.tile / seconds if seconds else inf)
        if least <= 0:
            return ()
        targets = worth.grow(layer, expert, tiles, least, layer)
        if targets:
            self._moving = layer, expert
        return tuple(targets)
