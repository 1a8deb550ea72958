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
from numpy.typing import NDArray

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
        self._target_tiles = 0  # sum of `target`
        self._ready_tiles = 0  # sum of `residency`
        self._fence = fence
        self._states = bytearray(slots)  # a SlotState each; FREE is 0
        self._free: deque[tuple[int, object]] = deque((slot, None) for slot in range(slots))
        self._ready: dict[tuple[int, int], list[int]] = {}

    @property
    def free(self) -> int:
        """Number of FREE slots."""
        return len(self._free)

    @property
    def missing(self) -> int:
        """Number of tiles below target, of all experts."""
        return self._target_tiles - self._ready_tiles

    def state(self, slot: int) -> SlotState:
        return SlotState(self._states[slot])

    def slots_of(self, layer: int, expert: int) -> list[int]:
        """The slots of the expert's READY tiles, in tile order. Do not change."""
        return self._ready.get((layer, expert), [])

    def set_targets(self, changes: Iterable[Target]) -> None:
        """Apply a policy's targets and evict tiles beyond them. Raises PlanError where a target is out of
        range or their sum exceeds the capacity; then no target changes."""
        changed = list(changes)
        if not changed:
            return
        after = self.target.copy()
        layers, experts = after.shape
        for c in changed:
            if not (0 <= c.layer < layers and 0 <= c.expert < experts and 0 <= c.tiles <= self.tiles):
                raise PlanError(f"the policy set a target that does not exist: {c}")
            after[c.layer, c.expert] = c.tiles
        total = int(after.sum())
        if total > self.capacity:
            raise PlanError(f"the policy's targets need {total} tiles, the cache holds {self.capacity}")
        self.target[...] = after  # in place, because policies hold views of it
        self._target_tiles = total
        for c in changed:
            self._evict(c.layer, c.expert)

    def below_target(self) -> NDArray[np.intp]:
        """Experts with residency below target: [m, 2] layer, expert."""
        return np.argwhere(self.residency < self.target)

    def take(self, count: int) -> list[tuple[int, object]]:
        """Return up to `count` FREE slots, each with the fence of its last reader; they become LOADING."""
        free, taken = self._free, []
        for _ in range(min(count, len(free))):
            taken.append(free.popleft())
            self._change(taken[-1][0], FREE, LOADING)
        return taken

    def land(self, layer: int, expert: int, tile: int, slot: int) -> bool:
        """A tile has landed in a LOADING slot. True: it is its expert's next tile and the target wants it, so
        the slot becomes READY. False: the slot stays LOADING, and the caller releases or uses it."""
        if not self.residency[layer, expert] == tile < self.target[layer, expert]:
            return False
        self._change(slot, LOADING, READY)
        self._ready.setdefault((layer, expert), []).append(slot)
        self.residency[layer, expert] = tile + 1
        self._ready_tiles += 1
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

    def _evict(self, layer: int, expert: int) -> None:
        """Release the expert's READY tiles beyond its target, the last one first."""
        slots = self._ready.get((layer, expert), [])
        keep = int(self.target[layer, expert])
        while len(slots) > keep:
            self._release(slots.pop(), READY)
            self._ready_tiles -= 1
        self.residency[layer, expert] = len(slots)

    def _release(self, slot: int, before: SlotState) -> None:
        self._change(slot, before, FREE)
        self._free.append((slot, self._fence()))

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
        if (int(self.residency.sum()), int(self.target.sum())) != (self._ready_tiles, self._target_tiles):
            raise AssertionError("a sum of residencies or targets is wrong")
        if self._ready_tiles != count[READY]:
            raise AssertionError("an expert without slots has a residency")
        if idle and count[LOADING] + count[IN_USE]:
            raise AssertionError(
                f"{count[LOADING]} slots LOADING and {count[IN_USE]} IN_USE without an order"
            )
