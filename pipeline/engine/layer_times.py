"""Seconds of a layer that no tile has: corrections of `round_trip`, `launch` and `both` by what layers take.

The probe measures them with warm caches and nothing else to do. In a step a layer takes longer, and where
both sides compute on the same cores they delay each other. So layers that only the host, only the device, or
both compute are timed from their plan to their end, and the time beyond that of the costs in force corrects
what belongs to that kind; where the link moves tiles for the layer, that is the `fetch` of each expert.

As in `cost_updates.py`, the median over the last steps counts, a change must be beyond chance, and a kind
that no plan has chosen for a while is again as it was measured at first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean, median
from typing import Literal, get_args

from pipeline.engine.cost_updates import DOUBT, FORGOTTEN, LEAST_CHANGE, WINDOW
from pipeline.policies.costs import Costs

Kind = Literal["host", "device", "both", "link"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ENOUGH = 8  # steps from which on a median counts: plans try one kind after the other


@dataclass
class _Beyond:
    """One kind's seconds beyond those of the costs in force."""

    correction: float = 0.0
    layers: list[float] = field(default_factory=list)  # of the present step
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # means
    latest: int = 0  # step

    def found(self) -> tuple[float, float] | None:
        """The median and its standard error; None where too few steps were measured."""
        if len(self.steps) < ENOUGH:
            return None
        middle = median(self.steps)
        spread = 1.4826 * median(abs(value - middle) for value in self.steps)
        return middle, 1.2533 * spread / sqrt(len(self.steps))


class LayerTimes:
    """Used by the engine's thread."""

    def __init__(self) -> None:
        self._step = 0
        self._kinds: dict[Kind, _Beyond] = {kind: _Beyond() for kind in KINDS}
        self._typical = 0.0  # seconds of a layer

    def begin_step(self) -> None:
        """Forget the layers of a step that failed."""
        for kind in self._kinds.values():
            kind.layers.clear()

    def note(self, kind: Kind, planned: float, measured: float, parts: int = 1) -> None:
        """A layer has taken `measured` seconds, `planned` by the costs in force. `parts`: what is corrected
        counts so many times in it."""
        self._kinds[kind].layers.append((measured - planned) / parts)
        self._typical += (measured - self._typical) / WINDOW

    def end_step(self) -> bool:
        """True where a correction changed."""
        self._step += 1
        changed = False
        for name, kind in self._kinds.items():
            if kind.layers:
                kind.steps.append(fmean(kind.layers))
                kind.latest = self._step
            elif kind.correction and self._step - kind.latest > FORGOTTEN:
                kind.correction, changed = 0.0, True
            if (found := kind.found()) is None:
                continue
            beyond, error = found
            after = kind.correction + beyond
            if name == "both":  # never less than the later side
                after = max(0.0, after)
            if abs(after - kind.correction) > max(DOUBT * error, LEAST_CHANGE * self._typical):
                kind.correction, changed = after, True
                kind.steps.clear()
        if changed:  # these build on the others
            self._kinds["both"].steps.clear()
            self._kinds["link"].steps.clear()
        return changed

    def restart(self) -> None:
        """The costs in force have changed: what was measured beyond them does not count any more."""
        for kind in self._kinds.values():
            kind.steps.clear()

    def corrected(self, costs: Costs) -> Costs:
        """`costs` as measured at first beside their tiles, with the corrections."""
        host, device, both, link = (self._kinds[kind].correction for kind in KINDS)
        return replace(
            costs,
            round_trip=max(0.0, costs.round_trip + host),
            launch=max(0.0, costs.launch + device),
            both=costs.both + both,
            fetch=max(0.0, costs.fetch + link),
        )
