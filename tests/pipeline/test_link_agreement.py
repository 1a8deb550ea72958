"""The replay's cache does what the tile mover does with the prefetcher's loop: after any calls the same tiles
are resident, on order and counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pipeline.experts.demand_stream import DemandStream
from pipeline.experts.tile_mover import TileMover
from test_link_order import CAPACITY, SHAPE, TickedLink, ticked_mover

from pipeline.experts.shares import Missing
from pipeline.policies.view import Target
from pipeline.replay.cache import SimulatedCache
from pipeline.replay.outcome import PhaseOutcome

COUNTED = {  # the engine's counters and the replay's
    "wanted_experts": "wanted_experts",
    "issued_experts": "issued_experts",
    "predicted_tiles": "predicted",
    "useful_tiles": "useful",
    "wasted_tiles": "wasted",
    "late_tiles": "late",
}
EXPERTS = st.integers(0, SHAPE.experts - 1)
TARGETS = st.lists(st.builds(Target, st.integers(0, 1), EXPERTS, st.integers(0, 4)), min_size=1, max_size=4)


@dataclass
class Retarget:
    targets: list[Target]
    predicted: bool


@dataclass
class Demand:
    layer: int
    cuts: dict[int, int]


CALLS = st.lists(
    st.builds(Retarget, TARGETS, st.booleans())
    | st.builds(
        Demand, st.integers(0, 1), st.dictionaries(EXPERTS, st.integers(1, 4), min_size=1, max_size=3)
    )
    | st.just("order")
    | st.integers(1, 3),  # ticks
    min_size=3,
    max_size=14,
)


@dataclass
class Both:
    """A mover and a simulated cache, on one clock: a tile takes a tick, and calls come just behind one."""

    mover: TileMover
    link: TickedLink
    cache: SimulatedCache = field(init=False)
    calls: int = 0

    def __post_init__(self) -> None:
        self.cache = SimulatedCache(SHAPE, CAPACITY, 1.0)
        self.cache.counters = PhaseOutcome(SHAPE.layers)

    @property
    def now(self) -> float:
        return self.link.ticks + 1e-6 * self.calls

    def call(self, call: Retarget | Demand | str | int) -> None:
        self.calls += 1
        self.cache.advance(self.now)  # what was ordered by the call before has begun
        match call:
            case Retarget(targets, predicted):
                wanted = self.mover.cache.target.copy()
                for target in targets:
                    wanted[target.layer, target.expert] = target.tiles
                changes = [Target(t.layer, t.expert, int(wanted[t.layer, t.expert])) for t in targets]
                changes.sort(key=lambda t: t.tiles - self.mover.cache.target[t.layer, t.expert])
                if wanted.sum() <= CAPACITY:  # in an order in which it never has more
                    self.mover.retarget(changes, predicted)
                    self.cache.retarget(changes, predicted)
            case "order":
                self._await_cancelled()
                self.mover.update()
                self.cache.update(self.now)
            case Demand(layer, cuts):
                self._await_cancelled()
                self._demand(layer, cuts)
            case int():
                for _ in range(call):
                    self._tick()
        self.mover.collect_landings()
        self.cache.advance(self.now)

    def _await_cancelled(self) -> None:
        """The engine learns of a cancelled order's end when the tile on the link has moved, the replay at
        once."""
        while any(entry.order.cancelled for entry in self.mover._background.values()):
            self._tick()

    def _tick(self) -> None:
        if self.link.moving:
            self.link.tick()
        else:
            self.link.ticks += 1
        self.mover.collect_landings()
        self.cache.advance(self.now)

    def _demand(self, layer: int, cuts: dict[int, int]) -> None:
        missing = []
        for expert, cut in sorted(cuts.items()):
            resident = int(self.mover.cache.residency[layer, expert])
            if here := min(resident, cut):
                self.mover.used(layer, expert, here)
                self.cache.used((layer, expert), here)
            if resident < cut:
                missing.append(Missing(expert, resident, cut))
        now, began, unfetched = self.now, self.link.ticks, list[Missing]()
        simulated = self.cache.demand(layer, [tuple(item) for item in missing], now) if missing else []
        landing = DemandStream(self.mover, layer, missing, unfetched).groups()
        streamed = [(expert, self.link.ticks - began) for group in landing for expert, _ in group]
        assert unfetched == []
        assert streamed == [(expert, ceil(round(landing - now, 3))) for expert, landing in simulated]

    def compare(self) -> None:
        mover, cache = self.mover, self.cache
        assert mover.cache.target.tolist() == cache.target.tolist()
        assert mover.cache.residency.tolist() == cache.residency.tolist()
        assert mover.ordered.tolist() == cache.ordered.tolist()
        assert {name: getattr(mover.counters, name) for name in COUNTED} == {
            name: getattr(cache.counters, ours) for name, ours in COUNTED.items()
        }
        assert mover.demanded == cache.counters.demanded
        under_way = [(order.layer, order.expert) for order in mover.link.under_way()]
        for layer in range(SHAPE.layers):
            landing = {one.expert for one in cache.landing(layer, self.now)}
            assert landing == {expert for of, expert in under_way if of == layer}


@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(CALLS)
def test_replay_and_engine_agree(calls: list[Retarget | Demand | str | int]) -> None:
    with ticked_mover() as (mover, link):
        both = Both(mover, link)
        for call in calls:
            both.call(call)
            both.compare()
