"""Costs that follow what runs: a factor for each of host, device and link, the exponential mean of measured
over forecast seconds.

Prompts and decoding have factors of their own, as a tile of few rows is bound by memory and one of many by
arithmetic. A factor is put in force where it is LEAST_CHANGE away from the one that is, so that plans do not
swing. A side without work falls back to the costs as measured at first: a plan that avoids a side would
otherwise never learn that it has recovered.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Literal, NamedTuple, get_args

from pipeline.arrays import PHASES, Phase
from pipeline.policies.costs import Costs, SecondsTable

Side = Literal["host", "device", "link"]
SIDES: tuple[Side, ...] = get_args(Side)
WEIGHT = 1 / 8  # of a step in the mean; the first steps weigh equally
LEAST_CHANGE = 0.1  # relative
FORGOTTEN = 256  # steps without work, in which a factor falls to a third of its distance to 1
LONGEST_RATIO = 16.0  # of one step: a stalled machine says little about costs


class Priced(NamedTuple):
    """Costs with tables of a tile's seconds."""

    costs: Costs
    host: SecondsTable
    device: SecondsTable

    @classmethod
    def at(cls, costs: Costs) -> Priced:
        """These costs, per tile, with their tables."""
        return cls(costs, SecondsTable(costs.host_seconds, 1), SecondsTable(costs.device_seconds, 1))


@dataclass
class Work:
    """A side's seconds in one step."""

    forecast: float = 0.0  # by the costs in force
    measured: float = 0.0


@dataclass
class _Factor:
    """The logarithm of a factor."""

    mean: float = 0.0
    in_force: float = 0.0
    steps: int = 0

    def note(self, work: Work) -> None:
        if work.forecast > 0 and work.measured > 0 and isfinite(work.measured):
            self.steps += 1
            most = log(LONGEST_RATIO)
            ratio = max(-most, min(log(work.measured / work.forecast), most)) + self.in_force
            self.mean += (ratio - self.mean) * max(WEIGHT, 1 / self.steps)
        else:
            self.mean *= 1 - 1 / FORGOTTEN

    def apply(self) -> bool:
        """Put the mean in force where it is far enough from what is. True where it was."""
        changed = abs(self.mean - self.in_force) > log(1 + LEAST_CHANGE)
        if changed:
            self.in_force = self.mean
        return changed


class Corrections:
    """The costs in force, from those measured at first and the steps since. Used by the engine's thread; they
    outlast policies."""

    def __init__(self, measured: Costs) -> None:
        """`measured`: at first, per tile."""
        self.measured = measured
        self._factors = {phase: {side: _Factor() for side in SIDES} for phase in PHASES}
        self._priced = dict.fromkeys(PHASES, Priced.at(measured))

    def priced(self, phase: Phase) -> Priced:
        """The costs in force in such a step."""
        return self._priced[phase]

    def note(self, phase: Phase, work: dict[Side, Work]) -> None:
        """Count a step that was forecast by the costs in force."""
        factors = self._factors[phase]
        for side in SIDES:
            factors[side].note(work[side])
        if any([factor.apply() for factor in factors.values()]):
            costs = self.measured.scaled(**{side: exp(factors[side].in_force) for side in SIDES})
            self._priced[phase] = Priced.at(costs)

    def report(self) -> dict[Side, dict[Phase, float]]:
        """The factors in force, for stats. May be called by other threads."""
        return {side: {phase: exp(self._factors[phase][side].in_force) for phase in PHASES} for side in SIDES}
