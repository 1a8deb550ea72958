"""The seconds of an engine's shares by the costs in force, and beside what was measured, which corrects the
costs (`corrections.py`)."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from pipeline.arrays import Phase
from pipeline.device import Device
from pipeline.engine.corrections import SIDES, Corrections, Priced, Side, Work
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.shares import Share
from pipeline.policies.costs import Costs, SecondsTable

FIRST, SAMPLED = 64, 4  # steps of which each is measured; of later ones every so many


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
        self._given = None if costs is None else Priced.at(costs)
        self._steps = 0
        self.begin_step("decode")

    @property
    def costs(self) -> Costs | None:
        """The costs in force in this step."""
        return None if self._priced is None else self._priced.costs

    def begin_step(self, phase: Phase) -> None:
        """Begin a step. Shares of one that failed will not be computed."""
        self._phase = phase
        self._priced = self._given if self.corrections is None else self.corrections.priced(phase)
        self._started = time.perf_counter()
        self._measures = self.corrections is not None and (self._steps < FIRST or not self._steps % SAMPLED)
        self._steps += 1
        self._running.clear()
        self._work: dict[Side, Work] = {side: Work() for side in SIDES}
        self._marks: list[tuple[object, object]] = []  # of the device's resident tiles
        self._copied = self._memory.copied()

    def host_begins(self, share: Share, alone: bool) -> None:
        """The host was given a share. `alone`: the device has none, so that the step waits for it."""
        if self._priced is not None and len(share.items):
            seconds = _seconds(self._priced.host, share, [hi - lo for _, lo, hi in share.items.tolist()])
            self._running.append(_HostShare(time.perf_counter(), seconds, alone))

    def host_ends(self, busy: float) -> None:
        """The first share that runs has been computed, in `busy` seconds of the slowest worker."""
        if not self._running or self._priced is None:
            return
        share = self._running.popleft()
        work = self._work["host"]
        work.forecast += share.seconds + (self._priced.costs.round_trip if share.alone else 0.0)
        work.measured += time.perf_counter() - share.given if share.alone else busy

    def device_began(self, share: Share) -> None:
        """The device computes its share's resident tiles, between the marks of its memory."""
        resident = share.items[:, 1].tolist()
        if self._measures and self._priced is not None and any(resident):
            seconds = _seconds(self._priced.device, share, resident)
            self._work["device"].forecast += self._priced.costs.launch + seconds
            self._marks.append(self._memory.resident_marks)

    def end_step(self) -> float:
        """The costs in force may change with the next step. Returns this one's seconds; 0 where costs do not
        follow what runs."""
        if self.corrections is None or self._priced is None:
            return 0.0
        seconds = time.perf_counter() - self._started
        if self._measures:
            tiles, copying = self._memory.copied()
            link = self._priced.costs.link * (tiles - self._copied[0])
            self._work["link"] = Work(link, copying - self._copied[1])
            marks = self._marks
            self._work["device"].measured = sum(self._device.seconds_between(*each) for each in marks)
            self.corrections.note(self._phase, self._work)
        return seconds


def _seconds(table: SecondsTable, share: Share, tiles: list[int]) -> float:
    """Seconds of a share with so many tiles of each item."""
    if len(share.rows) == len(tiles):  # a row each
        return table.of(1) * sum(tiles)
    rows = [end - start for start, end in pairwise(share.offsets.tolist())]
    return sum(seconds * count for seconds, count in zip(table(rows), tiles, strict=True))
