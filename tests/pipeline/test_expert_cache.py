"""The expert cache against an independent model: slots as a table, targets and residency as dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.errors import PlanError
from pipeline.experts.expert_cache import ExpertCache
from pipeline.policies.view import Target

LAYERS, EXPERTS, TILES = 2, 3, 4
EVERY = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
KEY = st.sampled_from(EVERY)
NO_TARGETS = [(-1, 0, 0), (LAYERS, 0, 0), (0, -1, 0), (0, EXPERTS, 0), (0, 0, -1), (0, 0, TILES + 1)]


class CacheMachine(RuleBasedStateMachine):
    """Any legal order of calls. `free` maps a slot to the fence it must carry, `loading` is a set, `ready`
    lists each expert's slots in tile order."""

    @initialize(capacity=st.integers(0, 12), staging=st.integers(1, 4))
    def begin(self, capacity: int, staging: int) -> None:
        self.now = 0
        self.cache = ExpertCache(LAYERS, EXPERTS, TILES, capacity, capacity + staging, lambda: self.now)
        self.capacity = capacity
        self.free: dict[int, int | None] = dict.fromkeys(range(capacity + staging))
        self.loading: set[int] = set()
        self.ready: dict[tuple[int, int], list[int]] = {key: [] for key in EVERY}
        self.target = dict.fromkeys(EVERY, 0)
        self.seen = self.cache.residency.view(), self.cache.target.view()  # as a policy's view holds them

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        taken = self.cache.take(count)
        assert len(taken) == min(count, len(self.free))
        for slot, fence in taken:
            assert fence == self.free.pop(slot)
            self.loading.add(slot)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), key=KEY, tile=st.integers(0, TILES - 1), likely=st.booleans())
    def land(self, data: Any, key: tuple[int, int], tile: int, likely: bool) -> None:
        if likely:  # the tile that comes next, where there is one
            tile = min(len(self.ready[key]), TILES - 1)
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        kept = tile == len(self.ready[key]) and tile < self.target[key]
        assert self.cache.land(*key, tile, slot) is kept
        if kept:
            self.loading.discard(slot)
            self.ready[key].append(slot)

    @rule(key=KEY)
    def place(self, key: tuple[int, int]) -> None:
        """All that the target still wants, as far as there are slots."""
        while len(self.ready[key]) < self.target[key] and self.free:
            before = set(self.loading)
            self.take(1)
            (slot,) = self.loading - before
            assert self.cache.land(*key, len(self.ready[key]), slot)
            self.loading.discard(slot)
            self.ready[key].append(slot)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def pass_through(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.discard(slot)
        self.now += 1
        self.cache.pass_through(slot)
        self.free[slot] = self.now

    @rule(changes=st.lists(st.tuples(KEY, st.integers(0, TILES)), max_size=6))
    def set_targets(self, changes: list[tuple[tuple[int, int], int]]) -> None:
        self.now += 1
        after = self.target | dict(changes)
        targets = [Target(*key, tiles) for key, tiles in changes]
        if changes and sum(after.values()) > self.capacity:
            with pytest.raises(PlanError, match="the cache holds"):
                self.cache.set_targets(targets)
            return
        self.cache.set_targets(targets)
        self.target = after
        for key in EVERY:
            for slot in self.ready[key][after[key] :]:
                self.free[slot] = self.now
            del self.ready[key][after[key] :]

    @rule(good=KEY, wrong=st.sampled_from(NO_TARGETS))
    def wrong_target(self, good: tuple[int, int], wrong: tuple[int, int, int]) -> None:
        """Refused as a whole: the good change beside it is not made either."""
        other = 0 if self.target[good] else 1
        with pytest.raises(PlanError, match="does not exist"):
            self.cache.set_targets([Target(*good, other), Target(*wrong)])

    @invariant()
    def agrees(self) -> None:
        self.cache.audit()
        assert self.cache.free == len(self.free)
        assert {key: self.cache.slots_of(*key) for key in EVERY} == self.ready
        residency, target = self.seen
        for key in EVERY:
            assert residency[key] == len(self.ready[key]) <= target[key] == self.target[key]
        lacking = [list(key) for key in EVERY if len(self.ready[key]) < self.target[key]]
        assert self.cache.lacking().tolist() == lacking


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_a_cache_needs_more_slots_than_it_keeps() -> None:
    with pytest.raises(ValueError, match="nothing to stream through"):
        ExpertCache(1, 1, 4, 4, 4, lambda: None)


@pytest.mark.parametrize("damage", ["slot lost", "slot twice", "residency"])
def test_the_audit_finds(damage: str) -> None:
    """A slot that vanished, a slot held twice, a residency that no slots stand behind."""
    cache = ExpertCache(1, 2, 4, 4, 6, lambda: None)
    cache.set_targets([Target(0, 0, 2)])
    (slot, _), *_ = cache.take(1)
    assert cache.land(0, 0, 0, slot)
    cache.audit()
    if damage == "slot lost":
        cache.slots_of(0, 0).clear()
    elif damage == "slot twice":
        cache.slots_of(0, 0)[0] = cache._free[0][0]
    else:
        cache.residency[0, 0] = 2
    with pytest.raises(AssertionError):
        cache.audit()


def test_what_is_resident_beyond_a_target_goes_from_the_end() -> None:
    """The leading tiles stay, and the fence is of the moment of the release."""
    fences = iter(range(100))
    cache = ExpertCache(1, 1, 4, 4, 5, lambda: next(fences))
    cache.set_targets([Target(0, 0, 4)])
    slots = [slot for slot, _ in cache.take(4)]
    for tile, slot in enumerate(slots):
        assert cache.land(0, 0, tile, slot)
    cache.set_targets([Target(0, 0, 1)])
    assert cache.slots_of(0, 0) == slots[:1]
    assert np.array_equal(cache.residency, [[1]])
    assert dict(cache.take(5)[1:]) == {slots[3]: 0, slots[2]: 1, slots[1]: 2}
