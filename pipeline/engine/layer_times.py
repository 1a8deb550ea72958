"""Seconds of a layer that no tile has: corrections of `round_trip`, `launch`, `wake`, `both` and `fetch` by
what layers take.

The probe measures them with warm caches and nothing else to do. In a step a layer takes longer, and where
both sides compute on the same cores they delay each other. So layers are timed from their plan to their end,
by kind: computed by the host, by the device, by both, or by the host alone behind a layer without it. The
time beyond that of the costs in force corrects what belongs to the kind; where the link moves tiles for the
layer, that is the `fetch` of each expert.

As in `cost_updates.py`, the median over the last steps counts, a change must be beyond chance, and a kind
that no plan has chosen for a while is again as it was measured at first. Where a trial finds the same again,
the next one is twice as far away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import median
from typing import Literal, get_args

from pipeline.engine.cost_updates import DOUBT, FORGOTTEN, LEAST_CHANGE, WINDOW
from pipeline.policies.costs import Costs

Kind = Literal["host", "device", "wake", "both", "link"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BEHIND: tuple[Kind, ...] = ("wake", "both")  # that come on top of others
LONGEST = 16 * FORGOTTEN  # steps from one trial to the next
ENOUGH = 8  # steps from which on a median counts: plans try one kind after the other
LONG, LONG_ENOUGH = 16, 3  # rows from which on a step takes long and chance weighs less, and how many count


@dataclass
class _Beyond:
    """One kind's seconds beyond those of the costs in force."""

    correction: float = 0.0
    layers: list[float] = field(default_factory=list)  # of the present step
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # means
    latest: int = 0  # step
    forgotten: float = 0.0  # the correction that was dropped last
    patience: int = FORGOTTEN  # steps without this kind until its correction is dropped

    def found(self) -> tuple[float, float]:
        """The median and its standard error."""
        middle = median(self.steps)
        spread = 1.4826 * median(abs(value - middle) for value in self.steps)
        return middle, 1.2533 * spread / sqrt(len(self.steps))


class LayerTimes:
    """Used by the engine's thread."""

    def __init__(self, rows: int = 1, corrections: Mapping[Kind, float] | None = None) -> None:
        """`rows`: of a step. `corrections`: those in force at first."""
        self._enough = ENOUGH if rows < LONG else LONG_ENOUGH
        self._step = 0
        known = corrections or {}
        self._kinds: dict[Kind, _Beyond] = {kind: _Beyond(known.get(kind, 0.0)) for kind in KINDS}
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
                kind.steps.append(sum(kind.layers) / len(kind.layers))
                kind.latest = self._step
            elif kind.correction and self._step - kind.latest > kind.patience:
                kind.forgotten, kind.correction, changed = kind.correction, 0.0, True
            if len(kind.steps) < self._enough:
                continue
            beyond, error = kind.found()
            after = kind.correction + beyond
            if name in BEHIND:  # never less than without
                after = max(0.0, after)
            if abs(after - kind.correction) > max(DOUBT * error, LEAST_CHANGE * self._typical):
                if kind.forgotten:  # found again: tried less often from now on
                    same = after > kind.forgotten / 2
                    kind.patience = min(2 * kind.patience, LONGEST) if same else FORGOTTEN
                    kind.forgotten = 0.0
                kind.correction, changed = after, True
                kind.steps.clear()
        if changed:  # these build on the others
            for name in (*BEHIND, "link"):
                self._kinds[name].steps.clear()
        return changed

    def restart(self) -> None:
        """The costs in force have changed: what was measured beyond them does not count any more."""
        for kind in self._kinds.values():
            kind.steps.clear()

    @property
    def corrections(self) -> dict[Kind, float]:
        """Of each kind in seconds. May be called by other threads."""
        return {name: kind.correction for name, kind in self._kinds.items()}

    def corrected(self, costs: Costs) -> Costs:
        """`costs` as measured at first beside their tiles, with the corrections."""
        host, device, wake, both, link = (self._kinds[kind].correction for kind in KINDS)
        return replace(
            costs,
            round_trip=max(0.0, costs.round_trip + host),
            launch=max(0.0, costs.launch + device),
            wake=costs.wake + wake,
            both=costs.both + both,
            fetch=max(0.0, costs.fetch + link),
        )
