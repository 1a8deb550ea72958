"""Times an engine's shares by the costs in force, and beside it as measured, which corrects the costs.

`Corrections` keeps a factor for each of host, device and link, the exponential mean of measured over forecast
seconds. Prompts and decoding have factors of their own, as a tile of few rows is bound by memory and one of
many by arithmetic. A factor is put in force where it is LEAST_CHANGE away from the one that is, so that plans
do not swing. A side without work falls back to the costs as measured at first: a plan that avoids a side
would otherwise never learn that it has recovered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from typing import Literal, NamedTuple, get_args

import numpy as np

from pipeline.arrays import PHASES, IntArray, Phase
from pipeline.counters import Elsewhere
from pipeline.device import Device
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.division import Split
from pipeline.policies.costs import Costs, Seconds

Priced = Callable[[Costs, Phase], Costs]
Side = Literal["host", "device", "link"]
SIDES: tuple[Side, ...] = get_args(Side)
WEIGHT = 1 / 8  # of a step in the mean; the first steps weigh equally
LEAST_CHANGE = 0.1  # relative
FORGOTTEN = 256  # steps without work, in which a factor falls to a third of its distance to 1
LONGEST_RATIO = 16.0  # of one step: a stalled machine says little about costs
FIRST, SAMPLED = 64, 4  # steps of which each is measured; of later ones every so many


@dataclass
class Spent:
    """A side's seconds in one step."""

    forecast: float = 0.0  # by the costs in force
    measured: float = 0.0


@dataclass
class _Factor:
    """The logarithm of a factor."""

    mean: float = 0.0
    in_force: float = 0.0
    steps: int = 0

    def note(self, work: Spent) -> None:
        if work.forecast > 0 and work.measured > 0 and isfinite(work.measured):
            self.steps += 1
            most = log(LONGEST_RATIO)
            ratio = max(-most, min(log(work.measured / work.forecast), most)) + self.in_force
            self.mean += (ratio - self.mean) * max(WEIGHT, 1 / self.steps)
        else:
            self.mean *= 1 - 1 / FORGOTTEN

    def apply(self) -> bool:
        """Put the mean in force where it is far enough from what is; returns whether it was."""
        changed = abs(self.mean - self.in_force) > log(1 + LEAST_CHANGE)
        if changed:
            self.in_force = self.mean
        return changed


@dataclass
class _Machine:
    """What another machine's share of a layer takes."""

    each: float = 0.0  # seconds for one of the host's, by the costs measured at first
    way: float = 0.0  # seconds there and back
    in_force: tuple[float, float] = (0.0, 0.0)
    steps: int = 0
    waits: int = 0  # steps that have waited for it

    def note(self, work: Spent, ways: list[float], host: float) -> None:
        """`host`: the host's factor in force."""
        if work.forecast > 0:
            self.steps += 1
            ratio = host * work.measured / work.forecast
            self.each += (ratio - self.each) * max(WEIGHT, 1 / self.steps)
        if ways:
            self.waits += 1
            self.way += (sum(ways) / len(ways) - self.way) * max(WEIGHT, 1 / self.waits)
        else:  # it ends before the rest, and may have become faster
            self.way *= 1 - 1 / FORGOTTEN

    def apply(self) -> bool:
        """As a factor's."""
        now = self.way, self.each
        changed = any(abs(b - a) > LEAST_CHANGE * a for a, b in zip(self.in_force, now, strict=True))
        if changed:
            self.in_force = now
        return changed


class Corrections:
    """The costs in force, from those measured at first and the steps since. Used by the engine's thread; they
    outlast policies."""

    def __init__(self, measured: Costs) -> None:
        """`measured`: at first, per tile."""
        self.measured = measured
        self._factors = {phase: {side: _Factor() for side in SIDES} for phase in PHASES}
        self._machines: dict[Phase, dict[str, _Machine]] = {phase: {} for phase in PHASES}
        self._priced = dict.fromkeys(PHASES, measured)

    def priced(self, phase: Phase) -> Costs:
        """The costs in force in such a step."""
        return self._priced[phase]

    def note(
        self, phase: Phase, work: dict[Side, Spent], elsewhere: Mapping[str, tuple[Spent, list[float]]]
    ) -> None:
        """Count a step that was forecast by the costs in force. `elsewhere`: by machine the host's seconds of
        all tiles of its layers, those of the machine, and of the ways to it that were waited for."""
        factors, known = self._factors[phase], self._machines[phase]
        for name in known.keys() - elsewhere.keys():
            del known[name]
        for name, (spent, ways) in elsewhere.items():
            machine = known.setdefault(name, _Machine())
            machine.note(spent, ways, exp(factors["host"].in_force))
        for side in SIDES:
            factors[side].note(work[side])
        changed = [factor.apply() for factor in factors.values()]
        changed += [machine.apply() for machine in known.values()]
        if any(changed) or len(known) != len(self._priced[phase].machines):
            costs = replace(self.measured, machines=tuple(machine.in_force for machine in known.values()))
            costs = costs.scaled(**{side: exp(factors[side].in_force) for side in SIDES})
            self._priced[phase] = costs

    def report(self) -> dict[Side, dict[Phase, float]]:
        """The factors in force, for stats. May be called by other threads."""
        return {side: {phase: exp(self._factors[phase][side].in_force) for phase in PHASES} for side in SIDES}


class _HostShare(NamedTuple):
    """A host share that runs."""

    given: float  # when
    seconds: float  # of its tiles, by the costs
    alone: bool  # the device computes nothing meanwhile


class Timing:
    """Measures the shares of one engine under one policy. Without costs it measures nothing."""

    def __init__(
        self,
        memory: DeviceMemory,
        device: Device,
        costs: Costs | None,
        corrections: Corrections | None = None,
    ) -> None:
        """`costs`: per tile. `corrections`: those of the costs, where these follow what runs."""
        self.corrections = None if costs is None else corrections
        self._memory = memory
        self._device = device
        self._running: deque[_HostShare] = deque()
        self._given = costs
        self._steps = 0
        self.begin_step("decode")

    @property
    def costs(self) -> Costs | None:
        """The costs in force in this step."""
        return self._priced

    def begin_step(self, phase: Phase, priced: Priced = lambda costs, phase: costs) -> None:
        """Begin a step, whose tiles cost what `priced` makes of dense ones' costs. Shares of one that failed
        will not be computed."""
        self._phase = phase
        self.dense = self._given if self.corrections is None else self.corrections.priced(phase)
        self._priced = None if self.dense is None else priced(self.dense, phase)
        self._started = time.perf_counter()
        self._measures = self.corrections is not None and (self._steps < FIRST or not self._steps % SAMPLED)
        self._steps += 1
        self._running.clear()
        # Marks are work for the device, so one layer of a step is timed, a different one each time.
        self._timed = self._steps % len(self._memory.residency)
        self._work: dict[Side, Spent] = {side: Spent() for side in SIDES}
        self._elsewhere: dict[str, tuple[Spent, list[float]]] = {}
        self._marks: list[tuple[object, object]] = []  # of the device's resident tiles
        self._copied = self._memory.copied()

    def host_begins(self, split: Split, alone: bool) -> None:
        """The host was given a layer's tiles. `alone`: the device has none, so that the step waits for it."""
        if self._measures and self._priced is not None and any(tiles := split.host_tiles().tolist()):
            seconds = _seconds(self._priced.host_at, split.routing.active.counts, tiles)
            self._running.append(_HostShare(time.perf_counter(), seconds, alone))

    def host_ends(self, split: Split, busy: float, elsewhere: Mapping[str, Elsewhere]) -> None:
        """The first share that runs has been computed, that of this split, in `busy` seconds of the slowest
        worker; and other machines' shares."""
        if self._priced is None:
            return
        if self._measures and elsewhere:
            active = split.routing.active
            seconds = _seconds(self._priced.host_at, active.counts, split.hi.take(active.experts).tolist())
            for name, share in elsewhere.items():
                spent, ways = self._elsewhere.setdefault(name, (Spent(), []))
                spent.forecast += seconds
                spent.measured += share.busy
                ways += [] if share.way is None else [share.way]
        if self._running:
            self._host_ended(self._running.popleft(), busy, waited=not elsewhere)

    def _host_ended(self, share: _HostShare, busy: float, waited: bool) -> None:
        """`waited`: for nothing else."""
        alone = share.alone and waited
        work = self._work["host"]
        assert self._priced is not None
        work.forecast += share.seconds + (self._priced.round_trip if alone else 0.0)
        work.measured += time.perf_counter() - share.given if alone else busy

    def times(self, layer: int) -> bool:
        """Tells whether this layer's resident tiles are timed in this step."""
        return self._measures and (self._device.on_host or layer == self._timed)

    def device_began(self, split: Split) -> None:
        """The device computes a timed layer's resident tiles, between the marks of its memory."""
        share = split.device
        resident = share.items[:, 1].tolist()
        if self.times(split.layer) and self._priced is not None and any(resident):
            seconds = _seconds(self._priced.device_at, np.diff(share.offsets), resident)
            self._work["device"].forecast += self._priced.launch + seconds
            self._marks.append(self._memory.resident_marks)

    def end_step(self) -> float:
        """The costs in force may change with the next step. Returns this one's seconds; 0 where costs do not
        follow what runs."""
        if self.corrections is None or self._priced is None:
            return 0.0
        seconds = time.perf_counter() - self._started
        if self._measures:
            tiles, copying = self._memory.copied()
            link = self._priced.link * (tiles - self._copied[0])
            self._work["link"] = Spent(link, copying - self._copied[1])
            marks = self._marks
            self._work["device"].measured = sum(self._device.seconds_between(*each) for each in marks)
            self.corrections.note(self._phase, self._work, self._elsewhere)
        return seconds


def _seconds(at: Seconds, rows: IntArray, tiles: list[int]) -> float:
    """Return the seconds of experts with so many rows and tiles each."""
    return sum(at[each] * count for each, count in zip(rows.tolist(), tiles, strict=True))
