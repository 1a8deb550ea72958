"""The tiles of a cache that are held because their experts were predicted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

Key = tuple[int, int]  # layer, expert


class Reserve:
    """Room for predicted experts: while a layer is computed with its own, those of later ones are fetched. Of
    an expert that the cache keeps in part, the reserve holds the other tiles."""

    def __init__(self, wanted: int, whole: int, tiles: int) -> None:
        """Room for `wanted` experts of `tiles` tiles, but at most for half of the `whole` experts that the
        cache holds."""
        self.size = min(wanted, whole // 2)  # experts without a cached tile
        self.tiles = self.size * tiles
        self.note = ""  # what does not fit
        if self.size < wanted:
            self.note = (
                f"predicted experts have half of the cache, room for {self.size} instead of {wanted}, so not"
                " all of them are prefetched"
            )
        self._free = self.tiles
        self._held: dict[int, dict[int, int]] = {}  # tiles, by layer and expert

    def take(self, wanted: Iterable[tuple[Key, int]]) -> list[Key]:
        """Hold so many tiles of these experts, as far as there is room for all of an expert's, and return
        them."""
        taken = []
        for key, tiles in wanted:
            if tiles > self._free:
                break
            self._free -= tiles
            self._held.setdefault(key[0], {})[key[1]] = tiles
            taken.append(key)
        return taken

    def holds(self, layer: int) -> bool:
        """Whether a tile of this layer is held."""
        return bool(self._held.get(layer))

    def give(self, expert: Key, tiles: int) -> bool:
        """Hold so many tiles less of this expert; False where none of it is held."""
        layer, index = expert
        held = self._held.get(layer)
        if not held or index not in held:
            return False
        given = min(tiles, held[index])
        self._free += given
        held[index] -= given
        if not held[index]:
            del held[index]
        return True

    def release(self, layer: int, needed: Collection[int] = ()) -> list[tuple[Key, int]]:
        """Hold no expert of a layer any longer but these; the others in ascending order, with the tiles that
        were held."""
        held = self._held.get(layer)
        if not held:
            return []
        released = sorted(held.keys() - set(needed))
        found = [((layer, expert), held.pop(expert)) for expert in released]
        self._free += sum(tiles for _, tiles in found)
        return found
