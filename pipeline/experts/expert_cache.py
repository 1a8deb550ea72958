"""The one owner of which slab slot holds which tile, and of each slot's state.

A slot is FREE, LOADING (given to an order of the prefetcher) or READY (its tile has landed). A slot that
becomes FREE carries the device's fence of that moment: whoever takes it waits for its last reader. An
expert's READY tiles are always its leading ones: `residency` counts them. A *target* says how many of
them to keep; tiles that land beyond it are streamed: computed once and released.

The cache counts; it sends no message and touches no memory. Targets sum to at most `capacity`, and the
slab has more slots than that, so a demanded tile always finds a slot once what is under way has landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.errors import PlanError
from pipeline.policies.view import Target


class ExpertCache:
    """Slots and residency of one slab."""

    def __init__(
        self, layers: int, experts: int, tiles: int, capacity: int, slots: int, fence: Callable[[], object]
    ) -> None:
        """`capacity`: tiles that may be kept; `slots` > capacity: all there are; `fence`: a mark behind
        everything the device was asked to compute so far."""
        if slots <= capacity:
            raise ValueError(f"{slots} slots leave nothing to stream through beside {capacity} cached tiles")
        self.tiles = tiles
        self.capacity = capacity
        self.slots = slots
        self.residency: IntArray = np.zeros((layers, experts), np.int32)
        self.target: IntArray = np.zeros((layers, experts), np.int32)
        self._fence = fence
        self._free: deque[tuple[int, object]] = deque((slot, None) for slot in range(slots))
        self._loading = 0
        self._ready: dict[tuple[int, int], list[int]] = {}

    @property
    def free(self) -> int:
        """Slots that an order may take now."""
        return len(self._free)

    def slots_of(self, layer: int, expert: int) -> list[int]:
        """The slots of the expert's READY tiles, in tile order. Do not change."""
        return self._ready.get((layer, expert), [])

    def set_targets(self, changes: Iterable[Target]) -> None:
        """Apply a policy's targets; what is resident beyond a target is freed. Raises PlanError where they
        are out of range or exceed the capacity, and changes nothing then."""
        after = self.target.copy()
        layers, experts = after.shape
        changed = list(changes)
        for c in changed:
            if not (0 <= c.layer < layers and 0 <= c.expert < experts and 0 <= c.tiles <= self.tiles):
                raise PlanError(f"the policy set a target that does not exist: {c}")
            after[c.layer, c.expert] = c.tiles
        if changed and int(after.sum()) > self.capacity:
            raise PlanError(f"the policy's targets need {after.sum()} tiles, the cache holds {self.capacity}")
        self.target[...] = after  # in place: views of it stay true
        for c in changed:
            self._trim(c.layer, c.expert)

    def lacking(self) -> NDArray[np.intp]:
        """Experts whose residency is below their target: [m, 2] layer, expert."""
        return np.argwhere(self.residency < self.target)

    def take(self, count: int) -> list[tuple[int, object]]:
        """Up to `count` FREE slots, each with the fence of its last reader; they become LOADING."""
        taken = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        self._loading += len(taken)
        return taken

    def land(self, layer: int, expert: int, tile: int, slot: int) -> bool:
        """A tile has landed in a LOADING slot. It becomes READY (True) if it is the expert's next and the
        target wants it; otherwise (False) the slot stays LOADING until `pass_through`."""
        if not self.residency[layer, expert] == tile < self.target[layer, expert]:
            return False
        self._loading -= 1
        self._ready.setdefault((layer, expert), []).append(slot)
        self.residency[layer, expert] += 1
        return True

    def pass_through(self, slot: int) -> None:
        """A LOADING slot whose tile was streamed, or never written, is FREE again."""
        self._loading -= 1
        self._release(slot)

    def _release(self, slot: int) -> None:
        self._free.append((slot, self._fence()))

    def _trim(self, layer: int, expert: int) -> None:
        slots = self._ready.get((layer, expert), [])
        keep = int(self.target[layer, expert])
        while len(slots) > keep:
            self._release(slots.pop())
        self.residency[layer, expert] = len(slots)

    def audit(self) -> None:
        """Check the books. Raises AssertionError: a bug in the engine."""
        ready = [slot for slots in self._ready.values() for slot in slots]
        held = ready + [slot for slot, _ in self._free]
        counts = {key: len(slots) for key, slots in self._ready.items()}
        if len(held) != len(set(held)) or len(held) + self._loading != self.slots:
            raise AssertionError(f"{self.free} free + {self._loading} loading + {len(ready)} ready")
        if any(self.residency[key] != count for key, count in counts.items()):
            raise AssertionError("residency differs from the slots held")
