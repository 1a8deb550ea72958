"""Costs that follow what runs: the measured seconds of host, device, link and zero copy over those that the
costs say, step after step, and the costs corrected by that ratio.

A side is slower while another one works, as they read the same memory. So each ratio is kept for both cases,
*contended* (another side worked for at least half of the time) and *alone*. Costs are those of a contended
machine: a ratio alone corrects them only where none is known under contention, and only upwards. Host and
device have a ratio for each row count of the grid; one without steps of its own follows its nearest.

Of each ratio the median of the last WINDOW steps counts. It is applied where it is further from the one in
force than by chance, and by LEAST_CHANGE at least, so that plans do not swing. After FORGOTTEN steps without
one, a side's costs are again those that were measured at first: a plan that avoids a side would otherwise
never learn that it has recovered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite, log, sqrt
from statistics import median
from typing import Any, Literal, get_args

from pipeline.policies.costs import Costs

Side = Literal["host", "device", "link", "zero_copy"]
SIDES: tuple[Side, ...] = get_args(Side)
SINGLE: tuple[Side, ...] = ("link", "zero_copy")  # one ratio for any number of rows
WINDOW, ENOUGH = 32, 16  # steps of a median, and from how many on it counts
LEAST_CHANGE = 0.05  # relative
LEAST = log(1 + LEAST_CHANGE)
DOUBT = 5.0  # standard errors that a median must be away from the ratio in force, which has one too
FORGOTTEN = 256  # steps


@dataclass
class Work:
    """A side's work in one step."""

    planned: float = 0.0  # seconds by the costs in force
    measured: float = 0.0
    tiles: int = 0
    rows: int = 0  # of each tile, summed

    def add(self, planned: float, tiles: int, rows: int) -> None:
        self.planned += planned
        self.tiles += tiles
        self.rows += rows


@dataclass
class _Ratios:
    """The logarithms of a ratio in the last steps."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    step: int = 0  # of the latest

    @property
    def median(self) -> float | None:
        return median(self.latest) if len(self.latest) >= ENOUGH else None

    @property
    def error(self) -> float:
        """The standard error of the median, from the median distance to it."""
        middle = median(self.latest)
        spread = 1.4826 * median(abs(value - middle) for value in self.latest)
        return 1.2533 * spread / sqrt(len(self.latest))


class CostUpdates:
    """The costs in force, from those measured at first and the steps since. Used by the engine's thread."""

    def __init__(self, costs: Costs, factors: Mapping[Side, Sequence[float]] | None = None) -> None:
        """`costs`: measured, per tile. `factors`: those in force at first, as if ENOUGH steps had shown
        them."""
        self.measured = self.costs = costs
        self._step = 0
        # by contention and grid point, only those with steps
        self._ratios: dict[Side, dict[tuple[bool, int], _Ratios]] = {side: {} for side in SIDES}
        self._factors: dict[Side, list[float]] = {  # logarithms of those in force
            side: [0.0] * (1 if side in SINGLE else len(costs.rows)) for side in SIDES
        }
        if factors:
            for side in factors:
                self._factors[side] = [log(factor) for factor in factors[side]]
                for point, factor in enumerate(self._factors[side]):
                    self._ratios[side][True, point] = _Ratios(deque([factor] * ENOUGH, WINDOW))
            self.costs = self._corrected()

    def end_step(self, work: Mapping[Side, Work], contended: Mapping[Side, bool]) -> bool:
        """Note a step. True where the costs in force changed."""
        self._step += 1
        for side, done in work.items():
            if done.planned > 0 and done.measured > 0 and isfinite(done.measured):
                point = 0 if side in SINGLE else self._point(done.rows / done.tiles)
                ratios = self._ratios[side].setdefault((contended[side], point), _Ratios())
                ratios.latest.append(log(done.measured / done.planned) + self._factors[side][point])
                ratios.step = self._step
        changed = [self._apply(side) for side in SIDES]
        if any(changed):
            self.costs = self._corrected()
        return any(changed)

    @property
    def factors(self) -> dict[Side, tuple[float, ...]]:
        """In force, of each side at each row count."""
        return {side: tuple(exp(factor) for factor in self._factors[side]) for side in SIDES}

    def report(self) -> dict[str, Any]:
        """For stats: of each side the factors in force at each row count, and the latest ratio in either
        case, or None. May be called by other threads."""
        return {
            side: {
                "factors": list(factors),
                "alone": self._latest(side, False),
                "contended": self._latest(side, True),
            }
            for side, factors in self.factors.items()
        }

    def _point(self, rows: float) -> int:
        """The grid's nearest point, by ratio."""
        grid = self.measured.rows
        return min(range(len(grid)), key=lambda index: abs(log(grid[index] / rows)))

    def _apply(self, side: Side) -> bool:
        """Bring a side's factors up to date. True where one changed."""
        ratios = self._ratios[side]
        for key in [key for key, found in ratios.items() if self._step - found.step > FORGOTTEN]:
            del ratios[key]
        factors = self._factors[side]
        known = {point: found for point in range(len(factors)) if (found := self._found(side, point))}
        changed = False
        for point, factor in enumerate(factors):
            value, steps = 0.0, None
            if known:
                value, steps = known[min(known, key=lambda near: abs(near - point))]
            change = abs(value - factor)
            if change > LEAST and (steps is None or change > DOUBT * steps.error):
                factors[point] = value
                changed = True
        return changed

    def _found(self, side: Side, point: int) -> tuple[float, _Ratios] | None:
        """The logarithm of a grid point's ratio, and the steps; None where too few were measured."""
        for contended, least in ((True, -inf), (False, 0.0)):
            ratios = self._ratios[side].get((contended, point))
            if ratios is not None and (middle := ratios.median) is not None:
                return max(middle, least), ratios
        return None

    def _latest(self, side: Side, contended: bool) -> float | None:
        known = list(self._ratios[side].items())  # copies, as the engine's thread goes on
        kind = [ratios for (case, _), ratios in known if case == contended]
        if not kind:
            return None
        return exp(median(list(max(kind, key=lambda ratios: ratios.step).latest)))

    def _corrected(self) -> Costs:
        first = self.measured
        host, device, link, zero_copy = ([exp(factor) for factor in self._factors[side]] for side in SIDES)
        return replace(
            first,
            host=tuple(cost * factor for cost, factor in zip(first.host, host, strict=True)),
            device=tuple(cost * factor for cost, factor in zip(first.device, device, strict=True)),
            link=first.link * link[0],
            zero_copy=first.zero_copy * zero_copy[0],
        )
