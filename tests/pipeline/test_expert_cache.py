"""The expert cache against an independent model: a dictionary of slots for each state, and one of targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.errors import PlanError
from pipeline.experts.cache import FREE, IN_USE, LOADING, READY, ExpertCache, SlotState
from pipeline.policies.view import Target

LAYERS, EXPERTS, TILES = 2, 3, 4
EVERY = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
KEY = st.sampled_from(EVERY)
NO_TARGETS = [(-1, 0, 0), (LAYERS, 0, 0), (0, -1, 0), (0, EXPERTS, 0), (0, 0, -1), (0, 0, TILES + 1)]


class CacheMachine(RuleBasedStateMachine):
    """Any legal order of calls. `free` maps a slot to the fence that it must carry, `loading` and `in_use`
    are sets, `ready` lists each expert's slots in tile order."""

    @initialize(capacity=st.integers(0, 12), staging=st.integers(1, 4))
    def begin(self, capacity: int, staging: int) -> None:
        self.now = 0
        self.cache = ExpertCache(LAYERS, EXPERTS, TILES, capacity, capacity + staging, lambda: self.now)
        self.capacity = capacity
        self.free: dict[int, int | None] = dict.fromkeys(range(capacity + staging))
        self.loading: set[int] = set()
        self.in_use: set[int] = set()
        self.ready: dict[tuple[int, int], list[int]] = {key: [] for key in EVERY}
        self.target = dict.fromkeys(EVERY, 0)
        self.views = self.cache.residency.view(), self.cache.target.view()  # as a policy holds them

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
        if likely:  # the expert's next tile, if it has one
            tile = min(len(self.ready[key]), TILES - 1)
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        kept = tile == len(self.ready[key]) and tile < self.target[key]
        assert self.cache.land(*key, tile, slot) is kept
        if kept:
            self.loading.discard(slot)
            self.ready[key].append(slot)

    @rule(key=KEY)
    def place(self, key: tuple[int, int]) -> None:
        """Everything that the target still wants, as far as slots are free."""
        while len(self.ready[key]) < self.target[key] and self.free:
            before = set(self.loading)
            self.take(1)
            (slot,) = self.loading - before
            assert self.cache.land(*key, len(self.ready[key]), slot)
            self.loading.discard(slot)
            self.ready[key].append(slot)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def release_loading(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.discard(slot)
        self.now += 1
        self.cache.release_loading(slot)
        self.free[slot] = self.now

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def begin_use(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.discard(slot)
        self.cache.begin_use(slot)
        self.in_use.add(slot)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def end_use(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(sorted(self.in_use)))
        self.in_use.discard(slot)
        self.now += 1
        self.cache.end_use(slot)
        self.free[slot] = self.now

    @rule(data=st.data())
    def illegal_transition(self, data: Any) -> None:
        """Each call is refused in every state but the one that it begins in, and changes nothing."""
        slot = data.draw(st.integers(0, self.cache.slots - 1))
        state = self.cache.state(slot)
        key = data.draw(KEY)
        wanted = [k for k in EVERY if len(self.ready[k]) < self.target[k]]
        calls = []
        if state is not LOADING:
            calls += [lambda: self.cache.release_loading(slot), lambda: self.cache.begin_use(slot)]
            if wanted:
                key = wanted[0]
                calls.append(lambda: self.cache.land(*key, len(self.ready[key]), slot))
        if state is not IN_USE:
            calls.append(lambda: self.cache.end_use(slot))
        for call in calls:
            with pytest.raises(AssertionError, match=f"slot {slot} is {state.name}"):
                call()

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
        """Refused as a whole: the valid change beside it is not made either."""
        other = 0 if self.target[good] else 1
        with pytest.raises(PlanError, match="does not exist"):
            self.cache.set_targets([Target(*good, other), Target(*wrong)])

    @invariant()
    def agrees(self) -> None:
        self.cache.audit()
        assert self.cache.free == len(self.free)
        assert {key: self.cache.slots_of(*key) for key in EVERY} == self.ready
        expected = dict.fromkeys(self.free, FREE) | dict.fromkeys(self.loading, LOADING)
        expected |= dict.fromkeys(self.in_use, IN_USE)
        expected |= {slot: READY for slots in self.ready.values() for slot in slots}
        assert {slot: self.cache.state(slot) for slot in range(self.cache.slots)} == expected
        residency, target = self.views
        for key in EVERY:
            assert residency[key] == len(self.ready[key]) <= target[key] == self.target[key]
        below = {key for key in EVERY if len(self.ready[key]) < self.target[key]}
        assert self.cache.below_target == below


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase


def test_cache_needs_more_slots_than_it_keeps() -> None:
    with pytest.raises(ValueError, match="leave none to stream through"):
        ExpertCache(1, 1, 4, 4, 4, lambda: None)


def lose_slot(cache: ExpertCache) -> None:
    cache.slots_of(0, 0).clear()


def list_twice(cache: ExpertCache) -> None:
    cache.slots_of(0, 0)[0] = cache._free[0][0]


def free_twice(cache: ExpertCache) -> None:
    cache._free.append(cache._free[0])


def forget_loading(cache: ExpertCache) -> None:
    cache._states[cache.take(1)[0][0]] = FREE


def raise_residency(cache: ExpertCache) -> None:
    cache.residency[0, 0] = 2


def invent_residency(cache: ExpertCache) -> None:
    cache.target[0, 1] = cache.residency[0, 1] = 1


def wrong_state(cache: ExpertCache) -> None:
    cache._states[cache.slots_of(0, 0)[0]] = LOADING


@pytest.mark.parametrize(
    "damage",
    [lose_slot, list_twice, free_twice, forget_loading, raise_residency, invent_residency, wrong_state],
)
def test_audit_finds(damage: Callable[[ExpertCache], None]) -> None:
    cache = ExpertCache(1, 2, 4, 4, 6, lambda: None)
    cache.set_targets([Target(0, 0, 2)])
    (slot, _), *_ = cache.take(1)
    assert cache.land(0, 0, 0, slot)
    cache.audit(idle=True)
    damage(cache)
    with pytest.raises(AssertionError):
        cache.audit()


@pytest.mark.parametrize("state", [LOADING, IN_USE])
def test_idle_audit_finds_a_slot_that_was_not_released(state: SlotState) -> None:
    cache = ExpertCache(1, 2, 4, 4, 6, lambda: None)
    ((slot, _),) = cache.take(1)
    if state is IN_USE:
        cache.begin_use(slot)
    cache.audit()
    with pytest.raises(AssertionError, match=r"1 (slots LOADING|IN_USE)"):
        cache.audit(idle=True)
