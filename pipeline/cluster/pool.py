"""The pool of an engine whose experts lie on several machines: its own lanes as ever, all others asked of
`Machines`. Where it has copies of others' lanes, they are computed here when those machines do not answer.

A batch of more rows than `LanePlan.rows` goes in several pieces of rows, also of the lanes that are computed
here: their descriptors are the same wherever they are computed. The remote lanes are asked for first, and
travel and are computed while the own ones are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pipeline.arrays import FloatArray, sum_on_host
from pipeline.cluster.lanes import Cut, HeldLanes, LaneDivider, LaneTicket, Pieces
from pipeline.cluster.machines import ComputeHere, Machines, Question
from pipeline.cluster.rows import RowCoder
from pipeline.config import LanePlan
from pipeline.counters import Elsewhere
from pipeline.experts.division import Split
from pipeline.experts.pool import HostPool, Ticket
from pipeline.policies.view import Routing
from shm.layout import StoreLayout
from shm.mask import NOTHING, Tally


@dataclass
class Rows:
    """Some rows of a batch: what was asked of other machines, and what is computed here."""

    question: Question | None
    own: LaneTicket
    copies: ComputeHere


@dataclass(eq=False)
class LanesTicket(Ticket):
    """A layer's share of the host, over all machines. Its parts are the lanes' sums, in the lanes' order."""

    lanes: int = 0
    machines: Machines | None = None
    every: list[Rows] = field(default_factory=list)

    @property
    def tally(self) -> Tally:
        return NOTHING  # formats with masks have no lanes

    def result(self) -> FloatArray:
        return sum_on_host(self.parts(), self.x.shape)

    @property
    def empty(self) -> bool:
        return not self.tasks and all(some.question is None for some in self.every)

    def parts(self) -> list[FloatArray]:
        spans = [self._sums(some) for some in self.every]
        if len(spans) == 1:
            return [spans[0][lane] for lane in range(self.lanes)]
        return [np.concatenate([sums[lane] for sums in spans]) for lane in range(self.lanes)]

    def _sums(self, some: Rows) -> dict[int, FloatArray]:
        sums = some.own.sums()
        self.busy += some.own.ticket.busy
        if some.question is not None:
            assert self.machines is not None
            sums |= self.machines.wait(some.question, some.copies)
            for name, share in some.question.elsewhere.items():
                before = self.elsewhere.get(name)
                # One span of rows waits for the other, so that there is no telling the way.
                both = share if before is None else Elsewhere(before.busy + share.busy, None)
                self.elsewhere[name] = both
        return sums

    def release(self) -> None:
        pass  # its parts are its own

    def abandon(self) -> None:
        for some in self.every:
            some.own.ticket.abandon()
            if some.question is not None and self.machines is not None:
                self.machines.abandon(some.question)


class LanesPool(HostPool):
    """A host pool, and the machines that hold the other lanes."""

    def use_lanes(self, plan: LanePlan, layout: StoreLayout, machines: Machines | None) -> None:
        """Divide by lanes from now on. `layout`: of this machine's part; without `machines` it holds all of
        them, else its own one and copies of others'."""
        self._plan, self._machines, self.interruptible = plan, machines, machines is not None
        self._divider_of_lanes = LaneDivider(plan.part, layout.shape.experts, plan.pieces)
        self._held = HeldLanes(self, plan.part)
        self._copies = frozenset(() if machines is None else plan.copies)
        self._coder = RowCoder(layout)

    def wait_machines(self, limit: float) -> None:
        """Wait until each lane has a machine that is ready, for so many seconds. Raises PeerLost where one
        refuses."""
        if self._machines is not None:
            lanes = range(len(self._plan.bounds) - 1)
            self._machines.wait_ready([lane for lane in lanes if lane not in self._own(None)], limit)

    def submit(self, split: Split, x: FloatArray, waits: bool = True) -> Ticket:
        x = np.ascontiguousarray(x, np.float32)
        step = self._plan.rows
        spans = [(split, x)] if len(x) <= step else _spans(split, x, step)
        mine = self._own(split)
        cuts = [self._divider_of_lanes.cut(some) for some, _ in spans]
        questions = [self._ask(cut, rows, mine) for cut, (_, rows) in zip(cuts, spans, strict=True)]
        every = [
            Rows(
                question,
                self._held.begin(cut.own(mine), rows, waits),
                partial(self._compute_copies, rows),
            )
            for question, cut, (_, rows) in zip(questions, cuts, spans, strict=True)
        ]
        tasks = [task for some in every for task in some.own.ticket.tasks]
        tiles, lanes = int(split.host_tiles().sum()), len(self._plan.bounds) - 1
        return LanesTicket(self, x, tiles, tasks, lanes=lanes, machines=self._machines, every=every)

    def update(self, wait_ms: int) -> bool:
        if self._machines is not None:
            self._machines.update(0)
        return super().update(wait_ms)

    def _own(self, split: Split | None) -> list[int]:
        """Returns the lanes that are computed here in any case: those that are no copies, and copies of which
        the device computes a share."""
        part, lo = self._divider_of_lanes.part, 0 if split is None else int(split.lo.max(initial=0))
        return [lane for lane in part.held if lane not in self._copies or lo > part.first(lane)]

    def _ask(self, cut: Cut, x: FloatArray, mine: Sequence[int]) -> Question | None:
        others = [lane for lane in range(len(self._plan.bounds) - 1) if lane not in mine]
        if self._machines is None or not others:
            return None
        return self._machines.ask(cut.whole(others), self._coder.encode(x), len(x))

    def _compute_copies(self, x: FloatArray, pieces: Mapping[int, Pieces]) -> dict[int, FloatArray]:
        return self._held.begin(pieces, x).sums()


def _spans(split: Split, x: FloatArray, step: int) -> list[tuple[Split, FloatArray]]:
    """Returns the batch in pieces of so many rows."""
    experts, weights = split.routing.experts, split.routing.weights
    places = [slice(lo, lo + step) for lo in range(0, len(x), step)]
    return [(split._replace(routing=Routing(experts[at], weights[at])), x[at]) for at in places]
