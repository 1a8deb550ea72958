"""The preset tandem: experts that are resident in part, and computed in part by either side.

Whether dividing a step is worth it at all is also measured. A cost model says what a layer's shares take, not
what dividing takes beside them: its planning, the two sides' arrays, caches that are colder afterwards. Where
experts are a small part of a step, that decides. So steps of either kind are compared by the clock: now and
then a few of the other kind, each time later where they were slower.
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median
from typing import ClassVar

import numpy as np

from pipeline.arrays import IntArray
from pipeline.policies.division import Balanced, Divider, cuts
from pipeline.policies.options import PAUSE, Option
from pipeline.policies.predictions import by_probability
from pipeline.policies.view import Gated, Plan, Policy, Routing, Signals, Target, View
from pipeline.policies.worth import Worth

PRESENT = 8  # steps of the present kind that are compared
TRIED, SKIPPED = 6, 2  # of the other kind, and how many of these come too early to count
LEAST = 0.02  # relative gain of a change
FIRST, LONGEST = 256, 4096  # steps from one trial to the next
HOPELESS = 1.5  # times the present seconds of the layers, by the costs: not tried


class HostTrial:
    """Compares steps of about equally many rows. `host`: the next step's experts are all the host's;
    `settled`: so were those of the kind that was faster."""

    def __init__(self) -> None:
        self.host = False
        self.settled = False
        self._present: deque[float] = deque(maxlen=PRESENT)
        self._tried: list[float] = []
        self._period = FIRST
        self._left = 0  # steps until the next trial

    def note(self, seconds: float, hopeless: bool) -> None:
        """A step has taken so long. `hopeless`: by the costs the host alone would take HOPELESS times that of
        the layers."""
        if self.host != self.settled:
            self._tried.append(seconds)
            if len(self._tried) == TRIED:
                self._compare()
            return
        self._present.append(seconds)
        self._left -= 1
        if self._left <= 0 and len(self._present) == PRESENT and (self.host or not hopeless):
            self.host = not self.settled

    def _compare(self) -> None:
        if median(self._tried[SKIPPED:]) < (1 - LEAST) * median(self._present):
            self.settled, self._period = self.host, FIRST
        else:
            self._period = min(2 * self._period, LONGEST)
        self.host, self._left = self.settled, self._period
        self._tried.clear()
        self._present.clear()


PAYS_WITHIN = 64  # steps in which a move in the background saves as much time as it takes of the link


class Tandem(Policy):
    """Exact. In every layer the balanced cut divides the active experts (`filling.py`): resident tiles on the
    device, and of the missing ones so many are fetched that both sides finish together.

    A fetched tile stays in the place of one that is worth less (`worth.py`), so the cache follows the text at
    no cost; of a row whose mask leaves channels out, fetched ones do not stay. While the link has nothing to
    move, tiles of the experts that the next layer's router names are fetched: as many as land before that
    layer, and none where that is none. Where a layer fetches nothing either, an expert that is worth more
    than a resident one is moved in the background, if that pays soon."""

    name = "tandem"
    help: ClassVar[str] = "Experts divided so that both sides finish together"
    options: ClassVar[tuple[Option, ...]] = (PAUSE,)
    needs_costs = True
    settles = 24

    def __init__(self, *, pause: str) -> None:
        self.pauses = pause == "1"
        self._divider = Divider()
        self._balanced: Balanced | None = None  # of the present layer, unless only the host is worth it
        self._moving: tuple[int, int] | None = None  # in the background

    @property
    def status(self) -> str:
        if self._trial is not None and self._trial.settled:
            return "experts: all on the host; by the clock, steps took longer with a share on the device"
        if all(self._worthless):
            return "experts: all on the host; by the costs it would be faster even with all of them resident"
        return ""

    def notes(self, view: View) -> tuple[str, ...]:
        lacks = "this model's routers cannot be applied to another layer's input"
        return () if view.probing else (f"tandem prefetches nothing: {lacks}",)

    def placement(self, view: View) -> IntArray:
        known = view.calibration
        counts = view.popularity if known is None else known.decode_counts
        assert view.router is not None
        self._worth = Worth(view.shape, view.capacity, counts, view.router)
        self._host_alone = Plan(np.zeros(view.shape.experts, np.int32))
        # by layer: missing tiles that could have landed before the next layer, when it was planned last
        self._ahead = [1] * view.shape.layers
        self._worthless = [False] * view.shape.layers  # by layer: only the host was worth it
        self._trials: dict[int, HostTrial] = {}  # by the power of two of a step's rows
        self._trial: HostTrial | None = None  # of this step
        self._alone = self._divided = 0.0  # its layers' seconds so far, on the host alone and as planned
        self._moving = None
        return self._worth.target.copy()

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        following = layer + 1
        wanted = view.prefetching and view.probing and view.capacity and following < view.shape.layers
        return (following,) if wanted and self._ahead[layer] else ()

    def gate(self, layer: int, signals: Signals, view: View) -> Gated:
        assert signals.logits is not None
        if not layer:
            self._begin_step(view)
        if view.capacity and not self._worthless[layer]:
            self._worth.note(layer, signals.logits, view.phase)
        return super().gate(layer, signals, view)

    def _begin_step(self, view: View) -> None:
        """Decide whether the host computes all of it."""
        trial, self._trial = self._trial, None
        if trial is not None and view.seconds:
            trial.note(view.seconds, self._alone > HOPELESS * self._divided)
        self._alone = self._divided = 0.0
        if view.phase == "decode" and view.capacity:
            self._trial = self._trials.setdefault(len(view.sequences).bit_length(), HostTrial())

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        active, tiles = routing.active, view.shape.tiles
        self._balanced = None
        count = len(active.experts)
        if not count:
            return self._host_alone
        worth, divider = self._worth, self._divider
        divider.use(view)
        worthless = self._trial is not None and self._trial.host
        if count == len(active.rows):
            worthless = worthless or divider.worthless(count, tiles)
        self._worthless[layer] = worthless
        if worthless:
            self._ahead[layer] = 0
            return self._host_alone
        kept = worth.target[layer][active.indices]
        resident = np.minimum(view.residency[layer][active.indices], kept)  # the others are evicted
        balanced = self._balanced = divider.balanced(active, resident, tiles)
        self._alone += balanced.alone
        self._divided += balanced.seconds
        if balanced.leaves or not balanced.pays:
            self._ahead[layer] = 0
        else:
            assert view.costs is not None
            free = balanced.spare + view.costs.other_at[len(routing.experts)]
            self._ahead[layer] = int(free / divider.tile) if divider.tile > 0 else tiles * count
        if not balanced.sides.device:
            return self._host_alone
        if balanced.moved:
            worth.observe(layer)
        experts: list[int] = active.experts.tolist()
        cut = np.zeros(view.shape.experts, np.int32)
        if len(balanced.groups) == 1:
            group = balanced.groups[0]
            own = worth.moved(layer, experts, resident.tolist(), group.taken - group.resident, cut)
        else:
            own = cuts(balanced, resident, tiles, worth.value[layer][active.indices].tolist())
            cut[active.indices] = own
        if not (balanced.moved and view.capacity) or (view.kept < 1 and balanced.fixed is divider.of_one):
            return Plan(cut)  # of what does not stay only channels are moved
        more = [wanted - held for wanted, held in zip(own, kept.tolist(), strict=True)]
        return tuple.__new__(Plan, (cut, tuple(worth.fetch(layer, experts, more))))  # in half the time

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        self.no_room = 0
        following, left = layer + 1, self._ahead[layer]
        if not left or following not in signals.probes:
            return ()
        assert view.router is not None
        named = by_probability(view.router(signals.probes[following], following))
        targets, self.no_room = self._worth.ahead(following, named, left, layer)
        return tuple(targets)

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        worth = self._worth
        balanced = self._balanced
        if balanced is None or balanced.moved or not view.capacity or view.phase != "decode":
            return ()
        if self._moving is not None:
            if view.residency[self._moving] < self._worth.target[self._moving]:
                return ()
            self._moving = None
        if balanced.leaves or not balanced.pays:
            return ()
        tiles = view.shape.tiles
        outside = worth.value[layer] * (worth.target[layer] == 0)
        expert = int(outside.argmax())
        # one row uses k experts; each tile that is resident saves the host's time of it
        assert view.costs is not None
        seconds = view.costs.host_at[1] * view.shape.top_k * PAYS_WITHIN
        least = float(outside[expert]) - (self._divider.tile / seconds if seconds else inf)
        if least <= 0:
            return ()
        targets = worth.grow(layer, expert, tiles, least, layer)
        if targets:
            self._moving = layer, expert
        return tuple(targets)
