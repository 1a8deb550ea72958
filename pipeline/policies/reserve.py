"""The experts of a cache that are held because they were predicted."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

Key = tuple[int, int]  # layer, expert


class Reserve:
    """Room for predicted experts: while a layer is computed with its own, those of later ones are fetched."""

    def __init__(self, wanted: int, whole: int) -> None:
        """Room for `wanted` experts, but for half of the `whole` experts that the cache holds at most."""
        self.size = min(wanted, whole // 2)  # experts
        self.note = ""  # what does not fit
        if self.size < wanted:
            self.note = (
                f"predicted experts have half of the cache, room for {self.size} instead of {wanted}, so not"
                " all of them are prefetched"
            )
        self._held: dict[int, set[int]] = {}  # experts by layer

    def take(self, wanted: Iterable[Key]) -> list[Key]:
        """Hold as many of these as there is room for, and return them."""
        free = self.size - sum(map(len, self._held.values()))
        taken = list(itertools.islice(wanted, max(0, free)))
        for layer, expert in taken:
            self._held.setdefault(layer, set()).add(expert)
        return taken

    def holds(self, layer: int) -> bool:
        """Whether an expert of this layer is held."""
        return bool(self._held.get(layer))

    def remove(self, expert: Key) -> bool:
        """Hold this expert no longer; False where it is not held."""
        layer, index = expert
        held = self._held.get(layer, set())
        found = index in held
        held.discard(index)
        return found

    def release(self, layer: int, needed: Collection[int] = ()) -> list[Key]:
        """Hold no expert of a layer any longer but these; the others, in ascending order."""
        held = self._held.get(layer)
        if not held:
            return []
        released = sorted(held.difference(needed))
        held.difference_update(released)
        return [(layer, expert) for expert in released]
