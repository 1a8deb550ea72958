"""The only owner of which slab slot holds which tile, and of each slot's state.

    FREE     an order may take it
    LOADING  given to a copy of this process or to an order of the prefetcher, which may be writing it
    READY    its tile has landed and is kept: one of its expert's leading tiles
    IN_USE   its tile has landed and is not kept: streamed, computed with once and released

    FREE -> LOADING -> READY -> FREE      a tile that is cached and later evicted
            LOADING -> IN_USE -> FREE     a tile that is streamed
            LOADING -> FREE               a tile that was not written, or that is no longer wanted;
                                          predicted channels (`mover.py`), once they were read

A slot that becomes FREE carries the device's fence of that moment; before it is ordered again, the device
must have passed that fence, because a kernel may still read the slot. `residency` counts an expert's READY
tiles, which are always its leading ones. A *target* is the number of tiles to keep.

The cache keeps records; it sends no message and touches no memory. Targets sum to at most `capacity`, and the
slab has more slots than that, so a demanded tile always finds a slot once the tiles under way have landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np

from pipeline.arrays import IntArray
from pipeline.errors import PlanError
from pipeline.policies.view import Target


class SlotState(IntEnum):
    """The state of one slab slot."""

    FREE = 0
    LOADING = 1
    READY = 2
    IN_USE = 3


FREE, LOADING, READY, IN_USE = SlotState


class ExpertCache:
    """Slots and residency of one slab. A wrong state raises AssertionError: a bug in the engine."""

    def __init__(
        self, layers: int, experts: int, tiles: int, capacity: int, slots: int, fence: Callable[[], object]
    ) -> None:
        """`capacity`: tiles that may be kept; `slots` > capacity: all slots of the slab, 0 without one;
        `fence`: returns a mark behind all work submitted to the device so far."""
        if slots <= capacity and slots:
            raise ValueError(f"{slots} slots leave none to stream through beside {capacity} cached tiles")
        self.tiles = tiles
        self.capacity = capacity
        self.slots = slots
        self.residency: IntArray = np.zeros((layers, experts), np.int32)
        self.target: IntArray = np.zeros((layers, experts), np.int32)
        # the same memory, of which Python reads and writes single numbers sooner
        self._resident, self._targets = self.residency.data, self.target.data
        self.below_target: set[tuple[int, int]] = set()  # experts with residency below target
        self._target_tiles = 0  # sum of `target`
        self.fence = fence
        self._states = bytearray(slots)  # a SlotState each; FREE is 0
        self._free: deque[tuple[int, object]] = deque((slot, None) for slot in range(slots))
        self._ready: dict[tuple[int, int], list[int]] = {}

    @property
    def free(self) -> int:
        """Number of FREE slots."""
        return len(self._free)

    def state(self, slot: int) -> SlotState:
        return SlotState(self._states[slot])

    def slots_of(self, layer: int, expert: int) -> list[int]:
        """The slots of the expert's READY tiles, in tile order. Do not change."""
        return self._ready.get((layer, expert), [])

    def set_targets(self, changes: Iterable[Target]) -> dict[tuple[int, int], int]:
        """Apply a policy's targets and evict tiles beyond them. Returns what the targets of these experts
        were. Raises PlanError where a target is out of range or their sum exceeds the capacity; then no
        target changes."""
        layers, experts = self.target.shape
        after: dict[tuple[int, int], int] = {}
        for change in changes:
            layer, expert, tiles = change
            if not (0 <= layer < layers and 0 <= expert < experts and 0 <= tiles <= self.tiles):
                raise PlanError(f"the policy set a target that does not exist: {change}")
            after[layer, expert] = tiles
        targets = self._targets
        before = {key: targets[key] for key in after}
        total = self._target_tiles + sum(after.values()) - sum(before.values())
        if total > self.capacity:
            raise PlanError(f"the policy's targets need {total} tiles, the cache holds {self.capacity}")
        self._target_tiles = total
        for key, tiles in after.items():
            targets[key] = tiles
            if self._resident[key] < tiles:
                self.below_target.add(key)
            else:
                self.below_target.discard(key)
                self._evict(key, tiles)
        return before

    def take(self, count: int) -> list[tuple[int, object]]:
        """Return up to `count` FREE slots, each with the fence of its last reader; they become LOADING."""
        free = self._free
        taken = [free.popleft() for _ in range(min(count, len(free)))]
        for slot, _ in taken:
            self._change(slot, FREE, LOADING)
        return taken

    def land(self, layer: int, expert: int, tile: int, slot: int) -> bool:
        """A tile has landed in a LOADING slot. True: it is its expert's next tile and the target wants it, so
        the slot becomes READY. False: the slot stays LOADING, and the caller releases or uses it."""
        key = layer, expert
        target = self._targets[key]
        if not self._resident[key] == tile < target:
            return False
        self._change(slot, LOADING, READY)
        self._ready.setdefault(key, []).append(slot)
        self._resident[key] = tile + 1
        if tile + 1 == target:
            self.below_target.discard(key)
        return True

    def release_loading(self, slot: int) -> None:
        """A LOADING slot becomes FREE: the order left it unwritten, or its tile is not wanted any more."""
        self._release(slot, LOADING)

    def begin_use(self, slot: int) -> None:
        """A LOADING slot becomes IN_USE: its tile has landed and is read once."""
        self._change(slot, LOADING, IN_USE)

    def end_use(self, slot: int) -> None:
        """An IN_USE slot becomes FREE: the kernel that reads it was started."""
        self._release(slot, IN_USE)

    def _evict(self, key: tuple[int, int], keep: int) -> None:
        """Release the expert's READY tiles from `keep` on, the last one first."""
        slots = self._ready.get(key, [])
        while len(slots) > keep:
            self._release(slots.pop(), READY)
        self._resident[key] = keep

    def _release(self, slot: int, before: SlotState) -> None:
        self._change(slot, before, FREE)
        self._free.append((slot, self.fence()))

    def _change(self, slot: int, before: SlotState, after: SlotState) -> None:
        if self._states[slot] != before:
            raise AssertionError(f"slot {slot} is {self.state(slot).name}, not {before.name}")
        self._states[slot] = after

    def audit(self, *, idle: bool = False) -> None:
        """Check that states, lists, residency and targets agree; with `idle` also that no slot is LOADING or
        IN_USE. Raises AssertionError: a bug in the engine."""
        states = self._states
        listed = {
            FREE: [slot for slot, _ in self._free],
            READY: [slot for slots in self._ready.values() for slot in slots],
        }
        count = {state: states.count(state) for state in SlotState}
        for state, slots in listed.items():
            right = all(states[slot] == state for slot in slots)
            if not right or not len(slots) == len(set(slots)) == count[state]:
                counted = ", ".join(f"{number} {state.name}" for state, number in count.items())
                raise AssertionError(f"{len(slots)} slots are listed as {state.name}, of {counted}")
        if any(self.residency[key] != len(slots) for key, slots in self._ready.items()):
            raise AssertionError("an expert's residency differs from its slots")
        if (self.residency > self.target).any():
            raise AssertionError("an expert's residency is beyond its target")
        below = {(int(layer), int(expert)) for layer, expert in np.argwhere(self.residency < self.target)}
        if (below, int(self.target.sum())) != (self.below_target, self._target_tiles):
            raise AssertionError("the experts below target, or the sum of the targets, are wrong")
        if int(self.residency.sum()) != count[READY]:
            raise AssertionError("an expert without slots has a residency")
        if idle and count[LOADING] + count[IN_USE]:
            raise AssertionError(
                f"{count[LOADING]} slots LOADING and {count[IN_USE]} IN_USE without an order"
            )
